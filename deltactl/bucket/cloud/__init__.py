"""Amazon S3 and what speaks like it, Google Cloud Storage and Azure Blob Storage.

All three go through obstore; what only S3 has (multipart uploads that keep a name, its listings,
its credentials) goes through botocore.
"""

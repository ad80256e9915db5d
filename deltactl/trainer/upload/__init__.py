"""From a capture to the bucket, in the background: put, confirmed, waited for."""

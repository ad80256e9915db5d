"""Bytes on this machine's disks: read without trust, mapped, and written whole or not at all.

Here is what is true of any file: that it may be torn or hostile, that it may shrink while it is
read, that its name appears when its content is there, and that whoever wrote it may have died. The
safetensors container is here as a container; what its metadata means is the business of
``format``. Imports ``core``.

Names to call: ``atomic.atomic_file``, ``atomic.atomic_directory``, ``mapped``, ``untrusted``,
``safetensors.read_header``, ``parallel.map_largest_first``, ``names``, ``cache``.
"""

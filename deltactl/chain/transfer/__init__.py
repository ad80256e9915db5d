"""Links between a bucket and this machine: in ranges, checked, and gone on with later."""

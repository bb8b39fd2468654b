"""Who sends what to whom: state of a bucket, scratch memory, and the reduce-scatter. Process groups are arguments."""

"""LoCo in PyTorch's own data parallelism: FSDP2 (:mod:`.fsdp2`) and ``DistributedDataParallel`` (:mod:`.ddp`)."""

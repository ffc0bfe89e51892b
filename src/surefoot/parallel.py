"""DDP and FSDP2: the only file that names them."""

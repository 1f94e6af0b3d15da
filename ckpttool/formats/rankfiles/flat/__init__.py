"""FSDP1 flat parameters: `LOCAL_STATE_DICT` rank files put together into whole parameters."""

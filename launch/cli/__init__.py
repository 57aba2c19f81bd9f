"""The command `moe-ep`: its commands, options and reports."""

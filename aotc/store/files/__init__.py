"""The file system: reading, writing that is never half done, locks between processes, temporary folders."""

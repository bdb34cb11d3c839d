"""What a miss does, and why a call is one: imported when a call has failed, or when a caller asks."""

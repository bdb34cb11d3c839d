"""Why something may not be: imported when a call or a load has failed, or when a caller asks."""

"""Which drafts are kept, and their commit on the device."""

"""What a checkpoint's config.json says: read strictly, refused where it is not understood."""

"""Head norms, rotary embedding and the write into the K/V pages."""

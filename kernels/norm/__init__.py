"""RMS normalisation, alone and after a residual addition."""

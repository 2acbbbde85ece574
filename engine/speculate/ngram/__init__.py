"""The n-gram drafters, under llama.cpp's names."""

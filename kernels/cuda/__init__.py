"""Building and launching the project's own CUDA C++: `Source` names a .cu file, `launch` runs a kernel of it."""

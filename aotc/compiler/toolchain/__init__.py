"""The C++ and Triton compilers: parallel, cached, with shared headers and wrappers."""

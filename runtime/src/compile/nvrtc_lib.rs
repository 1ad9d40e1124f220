//! NVRTC C interface.

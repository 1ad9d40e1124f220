//! Where NVRTC may be.

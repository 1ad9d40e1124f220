//! Reads the log of ptxas.

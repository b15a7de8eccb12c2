//! Nothing: this crate holds benchmarks.

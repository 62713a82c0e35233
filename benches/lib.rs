//! Benches of the Rust crates; each is named after the claim it supports.

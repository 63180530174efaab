//! The C ABI, `include/cinch.h`: one file per object.
//!
//! Every export is wrapped by `guard!`, which turns errors and panics into a code and a sentence;
//! `tests/meta/header.rs` fails if one is not. Numbers that come from C are plain integers here, never
//! Rust enums: a wrong number must be an error, not undefined behaviour. Handles are looked up,
//! never dereferenced. What is wrong for Rust callers too (buffer extents, overlap, roots, codecs)
//! is checked by `comm`.
// The names below are the names of the header.
#![allow(non_camel_case_types)]

#[macro_use]
mod guard;

mod adapt;
mod call;
mod codec;
mod collectives;
mod comm;
mod config;
mod device;
mod error;
mod feedback;
mod group;
mod handle;
mod handle_table;
mod id;
mod op;
mod report;
mod stats;
mod text;
mod types;
mod versioned;

pub use guard::caught;
pub use handle_table::HandleTable;
pub use op::read_scalar;

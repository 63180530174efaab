//! The C ABI `include/cinch.h`: one file per object of the header; `core` is shared with `nccl/`.
//!
//! `guard!` wraps every export and turns errors and panics into a code and a sentence;
//! `tests/meta/header.rs` fails if an export lacks it. Numbers that come from C are plain integers,
//! never Rust enums: a wrong number must be an error, not undefined behaviour. Handles are looked up,
//! never dereferenced. `comm` checks buffer extents, overlap, roots and codecs, because Rust callers
//! need these checks as well.
// The names below are the names of the header.
#![allow(non_camel_case_types)]

pub mod core;

#[macro_use]
mod guard;
#[macro_use]
mod versioned;

mod adapt;
mod call;
mod codec;
mod collectives;
mod comm;
mod config;
mod describe;
mod device;
mod error;
mod feedback;
mod group;
mod handle;
mod id;
mod op;
mod report;
mod request;
mod statistics;
mod stats;
mod text;
mod types;

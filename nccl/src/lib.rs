//! `libnccl.so.2` on cinch: a program built for NCCL runs on it unchanged.
//!
//! One file per object. Each function is written once, by `export!`, which gives it both of its
//! names (`ncclX` and `pnccl` for interposers), and keeps panics and errors from leaving it other
//! than as a code. Handles are tickets that are looked up, never dereferenced. What is wrong for
//! Rust callers too (buffers, roots, codecs) is checked by `cinch`.
//!
//! What is promised, and what is not there: `manual::nccl` of the `cinch` crate.
// Names and arguments below are those of the header; what the arguments must be is said there.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

// For its build script alone.
use cinch_nccl_soname as _;

#[macro_use]
mod boundary;
#[macro_use]
mod versioned;

mod coll_config;
mod collectives;
mod comm;
mod config;
mod connect_job;
mod deferred_free;
mod error;
mod extension;
mod group;
mod init;
mod memory;
mod op;
mod point_to_point;
mod properties;
mod register;
mod settings;
mod split;
mod stubs;
mod teardown;
pub mod types;
mod unique_id;
mod version;

pub use coll_config::ncclCollConfig_t;
pub use config::ncclConfig_t;
pub use extension::{OPTION_BLOCK, OPTION_CODEC, OPTION_OFF, VENDOR_ID, ncclConfigExt_t};
pub use group::ncclSimInfo_t;
pub use stubs::{STUBS, Stub, ncclTeam_t};

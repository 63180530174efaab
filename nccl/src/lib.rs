//! `libnccl.so.2` on cinch: a program that was built for NCCL runs on it unchanged.
//!
//! `export!` defines each function under both of its names (`ncclX`, and `pncclX` for interposers) and
//! returns errors and panics as a code. Handles are looked up, never dereferenced. The `cinch` crate
//! checks buffers, roots and codecs, because Rust callers need these checks as well. This library
//! shares `cinch::capi::core` with cinch.h.
//!
//! Imports go up this list only; `tests/meta/layers.rs` fails on a circle:
//! numbers and codes (`types`, `error`, `boundary`, `versioned`, `settings`), options (`config`,
//! `coll_config`, `extension`), `plugins`, communicators (`comm`, `deferred_free`), jobs (`connect_job`,
//! `teardown_job`), `group`, `ras`, and the remaining files, which hold the functions.
//!
//! `docs/nccl.md` lists promises and missing functions.
// Names and arguments are those of the header, which documents what the arguments must be.
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

#[macro_use]
mod boundary;
#[macro_use]
mod versioned;

#[cfg(test)]
mod abi_tests;
mod coll_config;
mod collectives;
mod comm;
mod config;
mod connect_job;
mod deferred_free;
mod error;
mod extension;
mod group;
mod grow;
mod init;
mod last_error;
mod memory;
mod op;
mod plugins;
mod point_to_point;
mod properties;
mod ras;
mod register;
mod settings;
mod split;
mod stubs;
mod teardown;
mod teardown_job;
pub mod types;
mod unique_id;
mod version;

pub use coll_config::ncclCollConfig_t;
pub use config::ncclConfig_t;
pub use extension::{OPTION_BLOCK, OPTION_CODEC, OPTION_OFF, VENDOR_ID, ncclConfigExt_t};
pub use group::ncclSimInfo_t;
pub use stubs::{STUBS, Stub, ncclTeam_t};

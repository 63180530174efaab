//! Shared core of the C front ends: `include/cinch.h` (the files beside this folder) and the drop-in
//! for NCCL (`nccl/`).
//!
//! A front end keeps its names, its numbers and its rules of blocking. Lookup of handles, panics at
//! the boundary, checks of pointers and numbers, open groups and created operators live here.

pub mod arguments;
pub mod collective_request;
pub mod created_ops;
pub mod guard;
pub mod handle_table;
pub mod open_group;
pub mod versioned_struct;

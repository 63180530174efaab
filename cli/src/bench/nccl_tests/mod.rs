//! What scripts written for nccl-tests expect: its option letters, its table and its JSON file.

mod json;
pub mod options;
mod table;

pub use json::write_json;
pub use table::{write_foot, write_head, write_row};

//! Option letters, table and JSON file of nccl-tests, for scripts that were written for it.

mod json;
mod letters;
pub mod options;
mod table;

pub use json::write_json;
pub use table::{write_foot, write_head, write_row};

//! NCCL's XML format of topologies, which `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

mod read;
mod write;

pub use read::read;
pub use write::write;

/// Largest size of a file in bytes.
const MAX_BYTES: usize = 8 << 20;

/// Largest number of elements in a file.
const MAX_ELEMENTS: usize = 4096;

/// Largest depth of elements in a file.
const MAX_DEPTH: usize = 64;

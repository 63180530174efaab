//! NCCL's XML format of topologies, which `NCCL_TOPO_DUMP_FILE` writes and `NCCL_TOPO_FILE` reads.

mod limits;
mod read;
mod write;

pub use limits::MAX_BYTES;
pub use read::read;
pub use write::write;

//! Memory that GPU ranks share: peer buffers and their layout, control words, and the staging that
//! a proxy thread carries to the network.

mod control;
mod device_buffers;
mod peer_buffer;
mod staging;

pub use control::ControlWords;
pub use device_buffers::DeviceBuffers;
pub use peer_buffer::{PeerBufferLayout, private_bytes};
pub use staging::{StagedRecv, StagedSend, Staging};

//! Memory: the user's buffers, shared and private regions, and the slot layout in them.

pub mod abi;
mod boxes;
mod buffers;
mod control;
mod device_buffers;
mod doorbell;
mod region;
mod slots;
mod staging;
mod user;

pub use boxes::{BoxShape, PRIVATE_BYTES};
pub use buffers::Buffers;
pub use control::ControlWords;
pub use device_buffers::DeviceBuffers;
pub use doorbell::{DOORBELL_BYTES, Ringer, Sleeper};
pub use region::Region;
pub use slots::{
    COUNTER_BYTES, Consumer, FifoPlaces, FifoShape, Header, LINE_BYTES, Place, Producer,
};
pub use staging::{StagedRecv, StagedSend, Staging};
pub use user::{UserBuffers, bytes_of, bytes_of_mut};

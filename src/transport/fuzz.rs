//! Body of the part of the fuzz target `members` that reads what ranks exchange before they connect.

use super::settings::{ConnectInfo, compare};
use super::{rdma, tcp};
use crate::bootstrap::fuzz::peer;
use crate::wire::{Reader, Wire};

pub use tcp::fuzz::pump;

/// Reads the information of ranks before they connect, and the offers of transports. What is read must be written
/// alike. Returns what `crate::bootstrap::fuzz` describes.
pub fn connect_info(data: &[u8]) -> Option<bool> {
    let (&kind, body) = data.split_first()?;
    match kind & 3 {
        0 => infos(body),
        1 => tcp::fuzz::addresses(body),
        2 => rdma::fuzz::ports(body),
        _ => rdma::fuzz::queue_pairs(body),
    }
}

/// Compares the information of up to four ranks of one host.
fn infos(body: &[u8]) -> Option<bool> {
    let mut reader = Reader(body);
    let (mut frames, mut peers) = (Vec::<Vec<u8>>::new(), Vec::new());
    while frames.len() < 4
        && let Ok(length) = reader.u16()
    {
        let frame = reader.bytes(usize::from(length).min(reader.0.len()));
        frames.push(frame.unwrap_or_default().to_vec());
        peers.push(peer(peers.len()));
    }
    let infos = compare(&frames, &peers).ok()?;
    for (info, frame) in infos.iter().zip(&frames) {
        assert_eq!(&info.to_bytes(), frame, "an info is written differently");
        assert_eq!(ConnectInfo::from_bytes(frame).as_ref(), Ok(info));
    }
    let has_three = infos.iter().any(|info| info.offers.len() == 3);
    (!infos.is_empty()).then_some(has_three)
}

//! The share of a GPU that each of its ranks may occupy.

use crate::bootstrap::OutOfBandRef;
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::Context;
use crate::plan::Resident;

/// Channels without which a rank cannot send and receive messages of one group at once.
const LEAST_CHANNELS: usize = 2;

/// Computes how many thread blocks each rank may have resident at once on a GPU that holds `whole`.
///
/// Ranks of one GPU share its multiprocessors. All ranks have equally many channels, so the
/// smallest share of any rank counts. Half of the GPU is left to other kernels, such as another
/// communicator's. Without it, kernels that wait for each other across GPUs could keep each other
/// from starting. A rank may have up to `asked` channels, and [`LEAST_CHANNELS`] in any case, beyond its share of that
/// half, within its share of the GPU.
pub(super) fn resident(
    exchange: &OutOfBandRef,
    context: &Context,
    whole: Resident,
    asked: Option<usize>,
) -> Result<Resident> {
    let mut part = context.device().uuid.to_vec();
    for blocks in [whole.channels, whole.fused] {
        part.extend((blocks as u32).to_le_bytes());
    }
    let all = exchange.all_gather(&part)?;
    let mut gpus = Vec::with_capacity(all.len());
    for (part, peer) in all.iter().zip(exchange.peers()) {
        let foreign = || {
            let text = format!("{peer} described its GPU in another format: use one version");
            Error::new(ErrorKind::Mismatch, text)
        };
        let (uuid, blocks) = part.split_at_checked(16).ok_or_else(foreign)?;
        let blocks: [u8; 8] = blocks.try_into().map_err(|_| foreign())?;
        let [channels, fused] = [0, 4].map(|at| {
            let bytes = [0, 1, 2, 3].map(|byte| blocks[at + byte]);
            u32::from_le_bytes(bytes) as usize
        });
        gpus.push((uuid, Resident { channels, fused }));
    }
    let ranks_on = |uuid: &[u8]| gpus.iter().filter(|(other, _)| *other == uuid).count();
    let least = |blocks: fn(&Resident) -> usize| {
        let shares = gpus.iter().map(|(uuid, whole)| {
            let (blocks, ranks) = (blocks(whole), ranks_on(uuid));
            let wanted = asked.unwrap_or(0).max(LEAST_CHANNELS);
            (blocks / ranks).min(wanted.max(blocks / 2 / ranks))
        });
        shares.min().unwrap_or(0)
    };
    let resident = Resident {
        channels: least(|whole| whole.channels),
        fused: least(|whole| whole.fused),
    };
    match resident {
        Resident {
            channels: LEAST_CHANNELS..,
            fused: 1..,
        } => Ok(resident),
        _ => Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "{} ranks share a GPU, whose multiprocessors hold too few channels for all of them \
                 at once; start fewer ranks on each GPU",
                gpus.iter()
                    .map(|(uuid, _)| ranks_on(uuid))
                    .max()
                    .unwrap_or(0)
            ),
        )),
    }
}

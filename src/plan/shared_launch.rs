//! Small collectives of a group that share a launch on GPUs. Each has channels of its own there, and is planned for a
//! schedule kernel.
//!
//! Which calls share a launch, and on which channels, follows from facts that all ranks share. A rank may still launch them
//! one after the other: on their channels its peers see no difference.

use super::gpu::bytes;
use super::limits::{GpuLimits, Limits};
use super::{Planner, Request};
use crate::gpu::abi::MAX_PEERS;
use crate::types::{CallTuning, CodecSetting, DType, Kernel, Level, Protocol};
use std::num::NonZeroU8;

/// Where a call of a group runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchPlace {
    /// The protocol, kernel and channels for which the call is planned.
    pub tuning: CallTuning,
    /// The first of its channels.
    pub first_channel: usize,
    /// Whether the call begins a launch: it shares none with the calls before it, and is no message between calls that share
    /// one.
    pub begins: bool,
}

impl LaunchPlace {
    /// Returns the place of a call that shares no launch.
    pub fn alone(request: &Request) -> LaunchPlace {
        LaunchPlace {
            tuning: request.tuning,
            first_channel: 0,
            begins: true,
        }
    }

    /// Returns `request` as it is planned at this place.
    pub fn request(&self, request: &Request) -> Request {
        Request {
            tuning: self.tuning,
            ..*request
        }
    }
}

/// Facts that calls of one launch have in common, so that one kernel runs them.
type SharedKernel = (bool, DType, CodecSetting);

impl Planner {
    /// Returns the places of the calls of a group, in order, each beside whether it may share a launch. Calls of up to
    /// `fuse_bytes` bytes do where they can.
    pub fn launch_places(&self, group: &[(Request, bool)], fuse_bytes: usize) -> Vec<LaunchPlace> {
        let kernel = |(request, may_share): &(Request, bool)| {
            let gpu = self.limits.gpu.as_ref().filter(|_| *may_share)?;
            let shared = shared_kernel(request, &self.limits, fuse_bytes)?;
            Some((gpu, shared, shared_protocol(gpu, shared)?))
        };
        let alone = |(request, _): &(Request, bool)| LaunchPlace::alone(request);
        let mut places: Vec<LaunchPlace> = group.iter().map(alone).collect();
        // Other ranks have other messages in their groups.
        let is_collective = |&at: &usize| !group[at].0.collective.is_message();
        let collectives: Vec<usize> = (0..group.len()).filter(is_collective).collect();
        let mut rest = &collectives[..];
        while let Some(&first) = rest.first() {
            let mut calls = 1;
            if let Some((gpu, shared, protocol)) = kernel(&group[first]) {
                let room = room(gpu, &group[first].0, protocol);
                let alike =
                    |at: &&usize| kernel(&group[**at]).is_some_and(|(_, other, _)| other == shared);
                let most = rest.iter().take(room.min(MOST_CALLS));
                calls = most.take_while(alike).count();
                if calls > 1 {
                    let channels = room / calls;
                    let tuning = CallTuning {
                        protocol: Some(protocol),
                        kernel: Some(Kernel::Schedule),
                        max_channels: NonZeroU8::new(channels as u8),
                    };
                    for (number, &at) in rest[..calls].iter().enumerate() {
                        places[at].tuning = tuning;
                        places[at].first_channel = number * channels;
                    }
                    for place in &mut places[first + 1..=rest[calls - 1]] {
                        place.begins = false;
                    }
                }
            }
            rest = &rest[calls..];
        }
        places
    }
}

/// Returns what a call has in common with those that may share its launch; `None` if it shares none. Sharing pays for calls
/// whose launch takes longer than their bytes. It needs a known codec, whose kernel follows from it, and peers on the host.
/// Residuals have the shape of a plan, which would depend on the call's neighbours. Random numbers in replays follow from
/// the messages of a channel, which calls of one launch have alike.
fn shared_kernel(request: &Request, limits: &Limits, fuse_bytes: usize) -> Option<SharedKernel> {
    let is_small = request.count > 0 && bytes(request, limits.nranks) <= fuse_bytes;
    let has_peers = (2..=MAX_PEERS).contains(&limits.nranks) && limits.hosts.count() == 1;
    let is_stochastic = Level::ALL
        .iter()
        .any(|level| request.codec.at(*level).is_stochastic());
    let is_open = request.tuning == CallTuning::AUTO
        && !request.codec.auto
        && !request.codec.needs_tensor()
        && !is_stochastic
        && request.feedback.is_none()
        && !request.collective.is_message();
    let shared = (request.collective.reduces(), request.dtype, request.codec);
    let kernel = limits.gpu.as_ref().and_then(|gpu| gpu.kernel);
    let has_kernel = kernel != Some(Kernel::Fused);
    (is_small && has_peers && is_open && has_kernel).then_some(shared)
}

/// Returns the protocol of a launch that calls share: lines of ll128, of which connections have many, where they arrive
/// whole. Only slots carry codecs. `None` if the settings ask for a protocol that some calls may not have.
fn shared_protocol(gpu: &GpuLimits, (_, _, codec): SharedKernel) -> Option<Protocol> {
    match (codec.is_lossy(), gpu.protocol, gpu.ll128) {
        (true, _, _) => Some(Protocol::Simple),
        (false, Some(Protocol::Ll128), false) => None,
        (false, Some(asked), _) => Some(asked),
        (false, None, true) => Some(Protocol::Ll128),
        (false, None, false) => Some(Protocol::Ll),
    }
}

/// Largest number of calls that share a launch. Their work items, with the steps that most of them share, fit its arguments;
/// blocks look up their item in pinned memory one after the other.
const MOST_CALLS: usize = 16;

/// Returns the number of channels of a launch that calls share.
fn room(gpu: &GpuLimits, request: &Request, protocol: Protocol) -> usize {
    let (_, channels) = gpu.fifos[protocol as usize];
    let most = gpu.most_channels(request).min(u8::MAX.into());
    gpu.resident.channels.min(channels).min(most).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::testing::{gpu_limits, plan_request};
    use crate::types::Collective;

    const LARGEST: usize = 64 << 10;

    fn planner(nranks: usize, blocks: usize) -> Planner {
        Planner::new(gpu_limits(nranks, blocks), 0, Isa::Scalar)
    }

    fn sum(bytes: usize, codec: &str) -> (Request, bool) {
        (plan_request(Collective::AllReduce, bytes / 4, codec), true)
    }

    #[test]
    fn small_calls_of_one_kernel_share_a_launch_on_channels_of_their_own() {
        let mut planner = planner(4, 132);
        let group: Vec<_> = (1..=9).map(|at| sum(4096 * at, "raw")).collect();
        let places = planner.launch_places(&group, LARGEST);
        let begins: Vec<bool> = places.iter().map(|place| place.begins).collect();
        assert_eq!(
            begins,
            [true, false, false, false, false, false, false, false, false]
        );
        let mut end = 0;
        for (place, (request, _)) in places.iter().zip(&group) {
            assert!(place.first_channel >= end, "{places:?}");
            let plan = planner.plan(&place.request(request)).unwrap();
            assert!(!plan.kernel.is_fused());
            assert_eq!(Some(plan.kernel.protocol), place.tuning.protocol);
            end = place.first_channel + plan.channels;
        }
    }

    #[test]
    fn other_calls_stay_alone() {
        let planner = planner(4, 132);
        let mut asked = sum(4096, "raw");
        asked.0.tuning.protocol = Some(Protocol::Simple);
        let mut fed = sum(4096, "raw");
        fed.0.feedback = Some(7);
        let apart = (sum(4096, "raw").0, false);
        for other in [
            sum(LARGEST + 4, "raw"),
            sum(4096, "linear8"),
            sum(4096, "auto:linear8"),
            sum(0, "raw"),
            sum(4096, "terngrad"),
            asked,
            fed,
            apart,
            (plan_request(Collective::AllGather, 100, "raw"), true),
        ] {
            let places =
                planner.launch_places(&[sum(4096, "raw"), other, sum(4096, "raw")], LARGEST);
            let alone: Vec<LaunchPlace> = [sum(4096, "raw"), other, sum(4096, "raw")]
                .iter()
                .map(|(request, _)| LaunchPlace::alone(request))
                .collect();
            assert_eq!(places, alone, "{other:?}");
        }
        let pair = [sum(4096, "raw"), sum(4096, "raw")];
        assert!(!planner.launch_places(&pair, LARGEST)[1].begins);
        assert!(planner.launch_places(&pair, 4095)[1].begins);
    }

    /// Ranks without the message have the same places.
    #[test]
    fn messages_do_not_change_the_places_of_collectives() {
        let planner = planner(4, 132);
        let message = (plan_request(Collective::SendRecv, 100, "raw"), true);
        let group = [sum(4096, "raw"), sum(4096, "raw"), sum(64, "raw")];
        let expected = planner.launch_places(&group, LARGEST);
        assert!(!expected[1].begins && !expected[2].begins);
        for at in 0..=group.len() {
            let mut longer = group.to_vec();
            longer.insert(at, message);
            let mut places = planner.launch_places(&longer, LARGEST);
            let inside = at > 0 && at < group.len();
            assert_eq!(places.remove(at).begins, !inside, "{at}");
            assert_eq!(places, expected, "{at}");
        }
    }

    /// The plan would fall back to a protocol with fewer channels.
    #[test]
    fn protocol_that_links_may_split_shares_nothing() {
        let mut limits = gpu_limits(4, 132);
        let gpu = limits.gpu.as_mut().unwrap();
        (gpu.protocol, gpu.ll128) = (Some(Protocol::Ll128), false);
        let planner = Planner::new(limits, 0, Isa::Scalar);
        let places = planner.launch_places(&[sum(4096, "raw"), sum(4096, "raw")], LARGEST);
        assert!(places.iter().all(|place| place.begins));
    }

    #[test]
    fn launch_has_no_more_channels_than_fit_the_gpu_and_begins_alike_after_any_of_them() {
        let planner = planner(2, 20);
        let group: Vec<_> = (0..50).map(|_| sum(1024, "linear8")).collect();
        let places = planner.launch_places(&group, LARGEST);
        let begins = |places: &[LaunchPlace]| -> Vec<usize> {
            let all = places.iter().enumerate();
            all.filter(|(_, place)| place.begins)
                .map(|(at, _)| at)
                .collect()
        };
        let room = begins(&places)[1];
        assert!(room > 1 && room <= 20, "{places:?}");
        assert_eq!(begins(&places), (0..50).step_by(room).collect::<Vec<_>>());
        assert_eq!(
            planner.launch_places(&group[room..], LARGEST),
            places[room..]
        );
    }
}

//! Lists the candidates for a call, with their predicted costs.

use super::algorithms::{Codecs, between, drop_unsuited, flat, keeps, no_hierarchy};
use super::busiest::{busiest, leaving};
use super::candidate::{Candidate, ChannelRings};
use super::limits::Limits;
use super::link_time::LinkWork;
use super::ring_set::ring_set;
use super::tuning::KernelVariant;
use super::work::{CandidateWork, moves_beside};
use super::{Geometry, Request, chunk_max, cost, gpu, granule};
use crate::error::{Error, ErrorKind, Result};
use crate::gpu::abi::MAX_PEERS;
use crate::schedule::{self, CostCounts, SchedulePattern};
use crate::types::{Algorithm, CodecSetting, KernelProtocol, Level};
use std::slice;

/// Returns every candidate for `request`, or only candidates of the algorithm that it asks for.
///
/// # Errors
/// Unsupported if the request asks for an algorithm that its collective does not have.
pub fn candidates(
    request: &Request,
    limits: &Limits,
    codecs: Codecs<'_>,
) -> Result<Vec<Candidate>> {
    let codec = codecs[Level::Inter as usize];
    let kept = keeps(request, codec);
    let mut all = flat(request, limits, codec);
    let no_hierarchy = no_hierarchy(request, limits);
    if no_hierarchy.is_none() && !between(request, limits, codecs).is_empty() {
        all.push(Algorithm::Hierarchical);
    }
    if let Some(asked) = request.algorithm {
        if kept && asked == Algorithm::OneShot {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} by oneshot with codec {}: a tensor scale needs an owner for each \
                         chunk; use ring, tree, direct or flat_tree",
                    request.collective, request.codec.inter
                ),
            ));
        }
        if let (Algorithm::Hierarchical, Some(why)) = (asked, no_hierarchy) {
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        let is_known = schedule::algorithms(request.collective).contains(&asked);
        if is_known && !all.contains(&asked) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} by {asked} on {} ranks: a rank exchanges messages with all others, and a kernel \
                     does with at most {MAX_PEERS}; use another algorithm",
                    request.collective, limits.nranks
                ),
            ));
        }
        if asked == Algorithm::Hierarchical && !all.contains(&asked) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} by hierarchical on {}: a rank exchanges messages with more than {MAX_PEERS} others, \
                     with which a kernel cannot; use ring",
                    request.collective,
                    limits.groups()
                ),
            ));
        }
        return variants(request, limits, codecs, &[asked]);
    }
    if let Some(preferred) = limits.algorithm
        && all.contains(&preferred)
    {
        return variants(request, limits, codecs, &[preferred]);
    }
    drop_unsuited(&mut all, request, limits, codec);
    variants(request, limits, codecs, &all)
}

/// Returns every candidate for `request` by one of `algorithms`.
fn variants(
    request: &Request,
    limits: &Limits,
    codecs: Codecs<'_>,
    algorithms: &[Algorithm],
) -> Result<Vec<Candidate>> {
    let codec = codecs[Level::Inter as usize];
    let two_levels = |&algorithm: &Algorithm| match algorithm {
        Algorithm::Hierarchical => between(request, limits, codecs),
        // Flat algorithms ignore the algorithm between hosts, so any single value will do.
        _ => vec![Algorithm::Direct],
    };
    let pairs = algorithms.iter().flat_map(|algorithm| {
        let betweens = two_levels(algorithm).into_iter();
        betweens.map(|between| (*algorithm, between))
    });
    let set = ring_set(request, limits);
    let set_of = |algorithm| set.filter(|_| algorithm == Algorithm::Ring);
    let Some(gpu) = &limits.gpu else {
        let with_rings = |pair: (Algorithm, Algorithm)| {
            let rings = std::iter::once(ChannelRings::ONE).chain(set_of(pair.0));
            rings.map(move |rings| (pair, rings))
        };
        return pairs
            .flat_map(with_rings)
            .map(|(pair, rings)| cheapest_cut(request, limits, codecs, pair, rings))
            .collect();
    };
    let mut found = Vec::new();
    for (algorithm, between) in pairs {
        for kernel in gpu::kernels(request, limits, gpu, codec, algorithm) {
            let variant = KernelVariant {
                algorithm,
                kernel,
                channels: usize::MAX,
                chunk: 0,
            };
            let of_rings =
                |rings| gpu::candidate(request, limits, gpu, codec, (variant, between, rings));
            found.push(of_rings(gpu.rings(request, limits, variant))?);
            if let Some(set) = set_of(algorithm).filter(|_| kernel == KernelProtocol::SIMPLE) {
                found.push(of_rings(set)?);
            }
        }
    }
    // If some candidate of the algorithm has the kernel and protocol that call and settings name, the others
    // are dropped.
    if found
        .iter()
        .any(|candidate| gpu.asks_for(request, candidate.kernel))
    {
        found.retain(|candidate| gpu.asks_for(request, candidate.kernel));
    }
    Ok(found)
}

/// Returns the number of elements at whose multiples both codecs may divide the message, and the
/// largest number of elements whose encodings fit a slot.
fn cut(request: &Request, limits: &Limits, codecs: Codecs<'_>) -> Result<(usize, usize)> {
    let whole = |level: Level| granule(request.dtype, codecs[level as usize]);
    let granule = whole(Level::Intra).max(whole(Level::Inter));
    let mut most = usize::MAX;
    for level in Level::ALL {
        let (spec, codec) = (request.codec.at(level), codecs[level as usize]);
        most = most.min(chunk_max(limits.slot_bytes, request.dtype, spec, codec)?);
    }
    match most / granule * granule {
        0 => Err(Error::invalid_argument(format!(
            "a slot of {} bytes holds {most} elements in one of codecs intra={} and inter={}, but \
             they can only be cut every {granule}; raise CINCH_SLOT_BYTES or CINCH_BUFFER_BYTES",
            limits.slot_bytes, request.codec.intra, request.codec.inter
        ))),
        most => Ok((granule, most)),
    }
}

/// Largest number of times that the chunk size is halved from the size that fills a slot.
const FINER: usize = 6;

/// Chunks are cut finer without measured costs if the predicted time falls below this part: the cost of a message
/// is then a guess.
const WORTH_FINER: f64 = 0.95;

/// Smallest size in bytes to which chunks are cut.
const SMALLEST_CHUNK: usize = 4 << 10;

/// Returns the candidate of one algorithm with the chunk size of least predicted time. Only
/// measured costs and a known topology can predict a gain for chunks smaller than a slot, so without
/// them such chunks are not tried.
fn cheapest_cut(
    request: &Request,
    limits: &Limits,
    codecs: Codecs<'_>,
    (algorithm, between): (Algorithm, Algorithm),
    rings: ChannelRings,
) -> Result<Candidate> {
    let two_levels = algorithm == Algorithm::Hierarchical;
    // A schedule that treats all ranks alike encodes all messages with the codec for [`Level::Inter`].
    let one = Request {
        codec: CodecSetting {
            intra: request.codec.inter,
            ..request.codec
        },
        ..*request
    };
    let (request, codecs) = match two_levels {
        true => (request, codecs),
        false => (&one, [codecs[Level::Inter as usize]; 2]),
    };
    let pattern = super::pattern(request, limits, (algorithm, between), rings);
    let leaving = leaving(&pattern, limits)?;
    let links = LinkWork::new(limits, &pattern)?;
    let (granule, most) = self::cut(request, limits, codecs)?;
    let cut = |most| Geometry::new(request.count, pattern.parts(), granule, most);
    let load = (&pattern, rings, leaving, links.as_ref());
    let try_cut = |geometry| candidate(request, limits, codecs, load, geometry);
    let mut best = try_cut(cut(most))?;
    if limits.machine.measured.is_none() && links.is_none() {
        return Ok(best);
    }
    let worth = match limits.machine.measured {
        Some(_) => 1.0,
        None => WORTH_FINER,
    };
    let mut geometry = best.geometry;
    for _ in 0..FINER {
        let half = (geometry.chunk() / 2).next_multiple_of(granule);
        if half >= geometry.chunk() || half * request.dtype.size() < SMALLEST_CHUNK {
            break;
        }
        geometry = cut(half);
        let finer = try_cut(geometry)?;
        if finer.seconds < worth * best.seconds {
            best = finer;
        } else if limits.machine.measured.is_none() {
            break;
        }
    }
    Ok(best)
}

fn candidate(
    request: &Request,
    limits: &Limits,
    codecs: Codecs<'_>,
    (pattern, rings, leaving, links): (&SchedulePattern, ChannelRings, usize, Option<&LinkWork>),
    geometry: Geometry,
) -> Result<Candidate> {
    let (algorithm, between) = (pattern.algorithm, pattern.between);
    let hops = pattern.hops();
    // A single thread drives all channels. Several channels help only where the wire moves bytes while the
    // core works. In shared memory they would only spread the slots over more cache.
    let channels = match moves_beside(limits.machine.transport) {
        true => limits
            .channels
            .min(request.tuning.most_channels())
            .min(geometry.passes()),
        false => 1,
    };
    let chunk = geometry.chunk();
    let message_bytes = |level: Level, elements: usize| match codecs[level as usize] {
        None => elements * request.dtype.size(),
        Some(codec) => codec.wire_bytes(elements),
    };
    let wire_bytes = Level::ALL.map(|level| message_bytes(level, chunk));
    let mut works = Vec::new();
    for rank in busiest(request, limits) {
        works.push(CandidateWork {
            counts: schedule::cost_counts(&pattern.schedule(rank)?, &limits.hosts),
            hops,
            passes: geometry.passes(),
            slots: limits.slots,
            chunk,
            element_bytes: request.dtype.size(),
            wire_bytes,
            codecs: Level::ALL.map(|level| request.codec.at(level).kind),
            leaving,
            hosts: limits.hosts.count(),
        });
    }
    let seconds = cost::seconds(&works, limits.machine);
    let alone = |work: &CandidateWork| cost::seconds(slice::from_ref(work), limits.machine);
    let busiest = works
        .iter()
        .max_by(|one, other| alone(one).total_cmp(&alone(other)));
    let counts = busiest.map_or(CostCounts::default(), |work| work.counts);
    // Ranks work while their links move other chunks, so the longer of the two counts.
    let link_seconds = links.map_or(0.0, |links| links.seconds(&geometry, message_bytes));
    let seconds = seconds.max(link_seconds);
    Ok(Candidate {
        algorithm,
        between,
        rings,
        geometry,
        channels,
        counts,
        hops,
        seconds,
        kernel: KernelProtocol::SIMPLE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Isa;
    use crate::plan::{Affine, MachineFacts, MeasuredCosts, Planner, gpu_tests};
    use crate::schedule::Groups;
    use crate::transport::HostLoad;
    use crate::types::{Collective, TransportKind};

    fn limits(hosts: &Groups) -> Limits {
        Limits {
            nranks: hosts.nranks().unwrap(),
            slot_bytes: 128 << 10,
            slots: 4,
            channels: 2,
            algorithm: None,
            machine: MachineFacts {
                transport: TransportKind::Tcp,
                inside: TransportKind::Shm,
                load: HostLoad::LIGHT,
                measured: None,
            },
            hosts: hosts.clone(),
            topology: None,
            gpu: None,
        }
    }

    /// Returns two placements of the ranks: consecutive ranks on each host, and ranks dealt to the
    /// hosts in turn.
    fn places(hosts: usize, ranks: usize) -> [Groups; 2] {
        let dealt = Groups::of_hosts((0..hosts * ranks).map(|rank| rank % hosts));
        [Groups::even_hosts(hosts, ranks), dealt]
    }

    #[test]
    fn what_leaves_the_busiest_host_is_known_from_a_few() {
        for (hosts, ranks) in (2..=20).flat_map(|hosts| [(hosts, 1), (hosts, 2), (hosts, 3)]) {
            for hosts in places(hosts, ranks) {
                let limits = limits(&hosts);
                for (algorithm, between) in [
                    (Algorithm::Tree, Algorithm::Direct),
                    (Algorithm::Ring, Algorithm::Direct),
                    (Algorithm::Hierarchical, Algorithm::Ring),
                    (Algorithm::Hierarchical, Algorithm::Direct),
                    (Algorithm::Hierarchical, Algorithm::Tree),
                ] {
                    if ranks == 1 && algorithm == Algorithm::Hierarchical {
                        continue;
                    }
                    let request = gpu_tests::request(Collective::AllReduce, 1 << 20, "raw");
                    let pattern = crate::plan::pattern(
                        &request,
                        &limits,
                        (algorithm, between),
                        ChannelRings::ONE,
                    );
                    let mut sent = vec![0; hosts.count()];
                    for rank in 0..limits.nranks {
                        let counts =
                            schedule::cost_counts(&pattern.schedule(rank).unwrap(), &hosts);
                        sent[hosts.of(rank).0] += counts.crossing[0];
                    }
                    let most = *sent.iter().max().unwrap();
                    let found = leaving(&pattern, &limits).unwrap();
                    let what = format!("{algorithm}/{between} on {hosts:?}: {found}, {sent:?}");
                    match algorithm {
                        // In a tree the sampled third host may not be the busiest, so its count may
                        // be a little below the largest.
                        Algorithm::Tree => {
                            assert!(4 * found >= 3 * most && found <= most, "{what}");
                        }
                        _ => assert_eq!(found, most, "{what}"),
                    }
                }
            }
        }
    }

    /// Returns measured costs of 10 Gbit/s between hosts, as `cinch bench --explain` prints them.
    fn measured() -> MeasuredCosts {
        let line = |fixed, each| Affine { fixed, each };
        let send = line(25e-6, 0.8e-9);
        let mut costs = MeasuredCosts::of_core(send, &[], Isa::Scalar).unwrap();
        costs.reduce = line(0.0, 0.1e-9);
        costs.encode = costs.encode.map(|_| line(0.0, 0.2e-9));
        costs.decode = costs.decode.map(|_| line(0.0, 0.1e-9));
        costs
    }

    /// Measured costs describe only links between hosts; links inside hosts keep the built-in
    /// constants.
    #[test]
    fn measured_costs_leave_messages_inside_hosts_cheap() {
        for hosts in places(4, 2) {
            let mut limits = limits(&hosts);
            let algorithm = |limits: &Limits, codec: &str| {
                let request = gpu_tests::request(Collective::AllReduce, 4 << 20, codec);
                let mut planner = Planner::new(limits.clone(), 0, Isa::Scalar);
                planner.plan(&request).unwrap().algorithm
            };
            for codec in ["raw", "linear8"] {
                limits.machine.measured = None;
                let constant = algorithm(&limits, codec);
                assert_eq!(constant, Algorithm::Hierarchical, "{codec} on {hosts:?}");
                limits.machine.measured = Some(measured());
                assert_eq!(algorithm(&limits, codec), constant, "{codec} on {hosts:?}");
            }
        }
    }

    /// Returns limits of ranks on one host, connected by shared memory.
    fn one_host(nranks: usize, cores: usize) -> Limits {
        let mut limits = Limits {
            nranks,
            hosts: Groups::ONE,
            ..limits(&Groups::even_hosts(2, 2))
        };
        limits.machine.transport = TransportKind::Shm;
        limits.machine.load = HostLoad {
            ranks: nranks,
            cores,
        };
        limits
    }

    /// With many ranks for a core the fewest messages win, and for large sums divided work.
    #[test]
    fn flat_tree_is_for_small_sums_of_ranks_that_share_cores() {
        let algorithm = |ranks: usize, cores: usize, bytes: usize, codec: &str| {
            let request = gpu_tests::request(Collective::AllReduce, bytes / 4, codec);
            let mut planner = Planner::new(one_host(ranks, cores), 0, Isa::Scalar);
            planner.plan(&request).unwrap().algorithm
        };
        for codec in ["raw", "linear8"] {
            for ranks in [33, 64, 256] {
                let of = |cores: usize, bytes: usize| algorithm(ranks, cores, bytes, codec);
                let what = format!("{codec}: {ranks} ranks");
                assert_eq!(of(2, 1 << 10), Algorithm::FlatTree, "{what}");
                assert_eq!(of(2, 16 << 10), Algorithm::FlatTree, "{what}");
                assert_ne!(of(ranks, 1 << 10), Algorithm::FlatTree, "{what}");
                // A single rank would send the sum to all others.
                assert_ne!(of(2, 64 << 20), Algorithm::FlatTree, "{what}");
            }
        }
        assert_eq!(algorithm(8, 2, 1 << 10, "raw"), Algorithm::OneShot);
    }

    #[test]
    fn predicted_time_does_not_depend_on_the_root() {
        for (nranks, cores) in [(2, 1), (8, 2), (8, 8), (33, 2)] {
            for collective in [Collective::Broadcast, Collective::Reduce] {
                let predicted = |root: usize| {
                    let request = Request {
                        root,
                        ..gpu_tests::request(collective, 1 << 14, "raw")
                    };
                    let all = candidates(&request, &one_host(nranks, cores), [None; 2]).unwrap();
                    let of = |one: &Candidate| (one.algorithm, one.seconds);
                    all.iter().map(of).collect::<Vec<_>>()
                };
                for root in [1, nranks / 2, nranks - 1] {
                    let what =
                        format!("{collective} of {nranks} ranks on {cores} cores from {root}");
                    assert_eq!(predicted(root), predicted(0), "{what}");
                }
            }
        }
    }

    #[test]
    fn a_large_sum_takes_the_way_by_which_the_least_leaves_a_host() {
        for hosts in places(4, 2) {
            let request = Request {
                algorithm: Some(Algorithm::Hierarchical),
                ..gpu_tests::request(Collective::AllReduce, 16 << 20, "raw")
            };
            let mut planner = Planner::new(limits(&hosts), 0, Isa::Scalar);
            let between = planner.plan(&request).unwrap().pattern.between;
            assert_ne!(between, Algorithm::Tree, "on {hosts:?}");
        }
    }
}

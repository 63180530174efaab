//! Schedules of communicators that have more ranks than a launch has peers.

use super::tests::{Case, case, case_on};
use super::*;
use crate::cpu::Isa;
use crate::gpu_links::PairLinks;
use crate::mem::PeerBufferLayout;
use crate::plan::{GpuLimits, Limits, MachineFacts, Planner, Request, Resident};
use crate::schedule::Groups;
use crate::testing::plan_request;
use crate::transport::HostLoad;
use crate::types::{Algorithm, Collective, Kernel, TransportKind};

/// Returns the numbers of launches of all ranks; the error of the first rank that has one.
fn launches(case: &Case, nranks: usize) -> Result<Vec<usize>> {
    let of = |rank| {
        let plan = case.plan(rank);
        let launches = PackedSchedule::launches(&plan.schedule, &plan.pattern)?;
        assert!(launches.iter().all(|one| one.ranks.len() <= MAX_PEERS));
        Ok(launches.len())
    };
    (0..nranks).map(of).collect()
}

#[test]
fn schedules_of_many_ranks_end_with_the_reference_result() {
    for nranks in [33, 48, 64] {
        for collective in Collective::ALL {
            for &algorithm in crate::schedule::algorithms(collective) {
                let case = case(collective, algorithm, nranks, 1);
                let what = format!("{collective} by {algorithm} on {nranks} ranks");
                let most = match launches(&case, nranks) {
                    Ok(numbers) => numbers.into_iter().max().unwrap(),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Unsupported, "{what}");
                        use Algorithm::{Direct, FlatTree, OneShot};
                        assert!(matches!(algorithm, Direct | OneShot | FlatTree));
                        continue;
                    }
                };
                use Collective::{AllToAll, Gather, Scatter};
                let expected = match collective {
                    AllToAll | Gather | Scatter if nranks - 1 > MAX_PEERS => {
                        (nranks / 2).div_ceil(MAX_PEERS / 2)
                    }
                    _ => 1,
                };
                assert_eq!(most, expected, "{what}");
                case.check();
            }
        }
    }
}

#[test]
fn hierarchical_schedules_of_many_hosts_end_with_the_reference_result() {
    for (hosts, ranks) in [(5, 8), (8, 8), (16, 3), (3, 16)] {
        let groups = Groups::even_hosts(hosts, ranks);
        for collective in Collective::ALL {
            for &between in SchedulePattern::between_groups(collective) {
                let levels = (groups.clone(), between);
                let nranks = hosts * ranks;
                let case = case_on(levels, collective, Algorithm::Hierarchical, nranks, 1);
                assert!(launches(&case, nranks).unwrap().iter().all(|&one| one == 1));
                case.check();
            }
        }
    }
}

/// Messages of a group share a launch, and with it its peers.
#[test]
fn calls_of_a_launch_share_its_peers() {
    let mut work_buffer = WorkBuffer::default();
    let mut add = |peer: usize| {
        let mut case = case(Collective::SendRecv, Algorithm::Direct, 40, 1);
        (case.problem.root, case.problem.peer) = (3, peer);
        let plan = case.plan(3);
        let packed = PackedSchedule::launches(&plan.schedule, &plan.pattern).unwrap();
        let at = Addresses::default();
        let added = work_buffer.add(&packed[0], work(&plan, ReduceOp::Sum, at).unwrap());
        added.map(|()| work_buffer.clone())
    };
    for peer in (4..40).rev().take(MAX_PEERS) {
        let launch = add(peer).unwrap();
        let (step, number) = (launch.steps.last().unwrap(), launch.peers.last().unwrap());
        assert_eq!(usize::from(launch.ranks[usize::from(*number)]), peer);
        assert_eq!(step.send_mask, 1 << number);
        assert_eq!(usize::from(step.peers), launch.peers.len() - 1);
    }
    // A second message to a known peer.
    assert_eq!(add(20).unwrap().ranks.len(), MAX_PEERS);
    assert_eq!(add(5).unwrap_err().kind(), ErrorKind::Internal);
}

fn limits(groups: &Groups, nranks: usize, ranks_per_gpu: usize) -> Limits {
    let shape = PeerBufferLayout::new(nranks, 64 << 20, 64).unwrap();
    assert!(shape.device_bytes() <= 64 << 20);
    let mut pairs = PairLinks::NVLINK;
    pairs.ranks_per_gpu = ranks_per_gpu;
    let gpu = GpuLimits {
        ll128: true,
        pairs,
        ..GpuLimits::new(&shape, Resident::both(16), 64)
    };
    Limits {
        nranks,
        slot_bytes: gpu.fifos[0].0,
        slots: shape.fifo(abi::Protocol::Simple).depth as usize,
        channels: gpu.fifos[0].1,
        algorithm: None,
        machine: MachineFacts {
            transport: TransportKind::Tcp,
            inside: TransportKind::Cuda,
            load: HostLoad::LIGHT,
            measured: None,
        },
        hosts: groups.clone(),
        topology: None,
        gpu: Some(gpu),
    }
}

/// Every call has a plan that a kernel can run, and all ranks have the same one.
#[test]
fn planner_has_kernels_for_every_call_of_many_ranks() {
    let worlds = [
        (Groups::ONE, 48),
        (Groups::ONE, 64),
        (Groups::even_hosts(5, 8), 40),
        (Groups::even_hosts(8, 8), 64),
        (Groups::even_hosts(32, 8), 256),
    ];
    for (groups, nranks) in worlds {
        let limits = limits(&groups, nranks, 1);
        let ranks = [0, 1, nranks / 2, nranks - 1];
        let mut planners = ranks.map(|rank| Planner::new(limits.clone(), rank, Isa::Scalar));
        for collective in Collective::ALL {
            for (count, codec) in [
                (1, "raw"),
                (5000, "raw"),
                (1 << 20, "raw"),
                (1 << 18, "linear8"),
            ] {
                let request = Request {
                    peer: nranks / 2,
                    ..plan_request(collective, count, codec)
                };
                let what =
                    format!("{collective} of {count} by {codec} on {groups}, {nranks} ranks");
                let plans = planners
                    .each_mut()
                    .map(|planner| planner.plan(&request).unwrap());
                for plan in &plans {
                    assert_eq!(plan.algorithm, plans[0].algorithm, "{what}");
                    assert_eq!(plan.kernel.kernel, Kernel::Schedule, "{what}");
                    let launches = PackedSchedule::launches(&plan.schedule, &plan.pattern);
                    launches.unwrap_or_else(|error| panic!("{what}: {error}"));
                }
            }
        }
        let direct = Request {
            algorithm: Some(Algorithm::Direct),
            ..plan_request(Collective::AllReduce, 1000, "raw")
        };
        let refused = planners[0].plan(&direct).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        assert!(refused.message().contains("at most 32"), "{refused}");
    }
}

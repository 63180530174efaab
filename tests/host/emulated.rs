//! Tests collectives over emulated links: they take longer, but results have the bits that they have without.

use cinch::comm::Call;
use cinch::config::{EmulatedMachine, FileChoice};
use cinch::mem::UserBuffers;
use cinch::testing::{Data, Pattern, local_world};
use cinch::types::Extent;
use cinch::{Algorithm, Collective, Config, DType};

const RANKS: usize = 8;

/// Runs a call of `count` elements on all ranks. Returns their outputs.
fn outputs(config: &Config, call: &Call) -> Vec<Vec<u8>> {
    outputs_of(config, call, Pattern::Gaussian)
}

fn outputs_of(config: &Config, call: &Call, pattern: Pattern) -> Vec<Vec<u8>> {
    let bytes = |extent: Extent| extent.elements(call.count, RANKS).unwrap() * call.dtype.size();
    local_world(RANKS, config, |comm| {
        let is_root = comm.rank() == call.root;
        let elements = call.collective.input_extent(is_root);
        let elements = elements.elements(call.count, RANKS).unwrap();
        let data = Data {
            pattern,
            dtype: call.dtype,
            seed: 27,
        };
        let input = data.vec(comm.rank(), elements);
        let mut output = vec![0; bytes(call.collective.output_extent(is_root))];
        comm.call(call, UserBuffers::new(&input, &mut output))
            .unwrap();
        output
    })
}

#[test]
fn emulated_links_change_no_bit() {
    let plain = Config::default();
    let emulated = Config {
        emulated: Some(EmulatedMachine {
            file: "A.xml".into(),
            xml: include_str!("../topology/A.xml").into(),
            scale: 50,
        }),
        ..Config::default()
    };
    let coded = Some("linear8".parse().unwrap());
    for (collective, algorithm, codec) in [
        (Collective::AllReduce, Some(Algorithm::Ring), None),
        (Collective::AllReduce, Some(Algorithm::Direct), None),
        (Collective::AllReduce, Some(Algorithm::Direct), coded),
        (Collective::AllGather, None, coded),
        (Collective::ReduceScatter, None, None),
        (Collective::AllToAll, None, None),
        (Collective::Broadcast, Some(Algorithm::Tree), None),
    ] {
        let call = Call {
            algorithm,
            codec,
            ..Call::new(collective, DType::F32, 70_001)
        };
        let expected = outputs(&plain, &call);
        assert!(expected.iter().flatten().any(|&byte| byte != 0));
        assert!(outputs(&emulated, &call) == expected, "{call:?}");
    }
}

/// Ranks on machine H share the message out to three rings. Sums of small integers are exact in any order.
#[test]
fn rings_in_several_orders_end_with_the_sums_of_one_ring() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/topology/H.xml");
    let plain = Config::default();
    let emulated = Config {
        topology: FileChoice::File(file.into()),
        emulated: Some(EmulatedMachine {
            file: "H.xml".into(),
            xml: include_str!("../topology/H.xml").into(),
            scale: 1000,
        }),
        ..Config::default()
    };
    for collective in [
        Collective::AllReduce,
        Collective::AllGather,
        Collective::ReduceScatter,
    ] {
        let call = Call {
            algorithm: Some(Algorithm::Ring),
            ..Call::new(collective, DType::F32, 200_003)
        };
        let explained = local_world(RANKS, &emulated, |comm| comm.explain(&call).unwrap());
        let chosen = explained[0].lines().find(|line| line.contains("cheapest"));
        assert!(chosen.unwrap().contains("ring-set/6"), "{}", explained[0]);
        let expected = outputs_of(&plain, &call, Pattern::Small);
        assert!(expected.iter().flatten().any(|&byte| byte != 0));
        assert!(
            outputs_of(&emulated, &call, Pattern::Small) == expected,
            "{call:?}"
        );
    }
}

//! Tests collectives over emulated links: they take longer, but results have the bits that they have without.

use cinch::comm::Call;
use cinch::config::EmulatedMachine;
use cinch::mem::UserBuffers;
use cinch::testing::{Data, Pattern, local_world};
use cinch::types::Extent;
use cinch::{Algorithm, Collective, Config, DType};

const RANKS: usize = 8;

/// Runs a call of `count` elements on all ranks. Returns their outputs.
fn outputs(config: &Config, call: &Call) -> Vec<Vec<u8>> {
    let bytes = |extent: Extent| extent.elements(call.count, RANKS).unwrap() * call.dtype.size();
    local_world(RANKS, config, |comm| {
        let is_root = comm.rank() == call.root;
        let elements = call.collective.input_extent(is_root);
        let elements = elements.elements(call.count, RANKS).unwrap();
        let data = Data {
            pattern: Pattern::Gaussian,
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

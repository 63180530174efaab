//! Tests ranks that stand for GPUs of a topology file, where switches separate them: ranks of a switch have peer
//! access, and pinned host memory connects the others.

use crate::coded;
use crate::cover::Rng;
use crate::harness::{Check, Setup, Verdict, ensure};
use crate::hosts::cases_of;
use crate::options::Options;
use crate::world::World;
use cinch::Algorithm;
use cinch::config::{EmulatedMachine, FileChoice};
use cinch::types::TransportKind;

/// Name of the check, topology file, text of the file, and number of ranks.
const WORLDS: [(&str, &str, &str, usize); 3] = [
    ("2x4", "A.xml", include_str!("../topology/A.xml"), 8),
    ("4x2", "B.xml", include_str!("../topology/B.xml"), 8),
    ("uneven", "A.xml", include_str!("../topology/A.xml"), 6),
];

pub fn checks(options: &Options) -> Vec<Check> {
    let checks = WORLDS.map(|(name, file, xml, nranks)| {
        let check = Check::new(format!("topology/{name}-gpus1"), 1, move |setup| {
            switches(setup, file, xml, nranks)
        });
        check.within(options.either(180, 540))
    });
    checks.into()
}

/// Runs collectives by hierarchical and by the library's choice, and compares their bits with the host engine.
fn switches(setup: &Setup, file: &str, xml: &str, nranks: usize) -> Verdict {
    let mut world = World::new(setup, nranks, 1);
    world.config.emulated = Some(EmulatedMachine {
        file: file.into(),
        xml: xml.into(),
        scale: 1,
    });
    let folder = std::env::temp_dir().join(format!("cinch-topology-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(file);
    std::fs::write(&path, xml)?;
    world.config.topology = FileChoice::File(path);
    let verdict = run(setup, &world);
    // A folder that is left behind harms nothing.
    let _ = std::fs::remove_dir_all(&folder);
    verdict
}

fn run(setup: &Setup, world: &World) -> Verdict {
    let groups = world.run(|comm| {
        let info = comm.info();
        let mut kinds = info.transports.iter().flatten();
        let all_cuda = kinds.all(|kind| *kind == TransportKind::Cuda);
        ensure(all_cuda, || format!("{:?}", info.transports))?;
        Ok(comm.limits()?.groups().to_string())
    })?;
    let mut rng = Rng::new(setup.options.seed ^ 0x70b0);
    let codecs = ["raw", "linear8", "dynamic8"];
    let nranks = world.nranks();
    let mut cases = cases_of(Some(Algorithm::Hierarchical), &codecs, &mut rng, nranks);
    cases.extend(cases_of(None, &codecs[1..], &mut rng, nranks));
    coded::matches_host_engine(world, &cases)?;
    let count = cases.len();
    Ok(format!(
        "{count} cases on {}, equal to the host engine",
        groups[0]
    ))
}

//! Settings and launchers' variables of the environment, and files of hosts.

use super::host_file;
use super::input::Input;
use cinch::Config;
use cinch::bootstrap::{discover, half_set};
use cinch::config::{KNOBS, Origin, call_codec, parse_bytes};
use std::collections::BTreeMap;

/// Reads lines `NAME=VALUE` as an environment, or the text as a file of hosts.
pub fn environment(data: &[u8]) -> Option<bool> {
    let mut input = Input(data);
    let kind = input.u8();
    let text = String::from_utf8_lossy(input.0);
    match kind {
        b'H' => hosts(&text),
        _ => variables(&text),
    }
}

fn hosts(text: &str) -> Option<bool> {
    let hosts = host_file::parse(text).ok()?;
    let slots: usize = hosts.iter().map(|host| host.slots).sum();
    let all = host_file::fill(hosts.clone(), None);
    assert_eq!(all.as_ref(), Ok(&hosts), "all slots are filled");
    let fewer = host_file::fill(hosts.clone(), Some(slots / 2)).expect("fewer ranks than slots");
    assert_eq!(
        fewer.iter().map(|host| host.slots).sum::<usize>(),
        slots / 2
    );
    assert!(host_file::fill(hosts.clone(), Some(slots + 1)).is_err());
    Some(hosts.len() >= 2 && slots > 8)
}

fn variables(text: &str) -> Option<bool> {
    let mut config = Config::default();
    let mut environment = BTreeMap::new();
    for line in text.lines() {
        let Some((name, value)) = line.split_once('=') else {
            let _ = (call_codec(line), parse_bytes(line));
            continue;
        };
        environment.insert(name.to_string(), value.to_string());
        let before = config.clone();
        match config.set(name, value, Origin::Environment) {
            Ok(()) => assert!(config.is_set(name)),
            Err(_) => assert!(config == before, "a refused {name} changed the settings"),
        }
    }
    // Each setting reads what it shows.
    for knob in KNOBS {
        let shown = (knob.show)(&config);
        if !shown.is_empty() {
            let mut again = config.clone();
            let read = again.set(knob.name, &shown, Origin::Environment);
            assert!(read.is_ok(), "{}={shown}: {read:?}", knob.name);
            assert_eq!((knob.show)(&again), shown, "{}", knob.name);
        }
    }
    let lookup = |name: &str| environment.get(name).cloned();
    let _ = half_set(lookup);
    let launch = discover(&config, lookup).ok()??;
    assert!(launch.rank < launch.nranks);
    Some(launch.launcher == "torchrun" && launch.nranks > 2)
}

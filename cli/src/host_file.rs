//! Files of hosts for `cinch run --hosts`.

/// A host, and the number of ranks that it takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Name, as ssh takes it.
    pub name: String,
    /// Number of ranks.
    pub slots: usize,
}

/// Parses a file of hosts, with `HOST [slots=N]` on each line; N is 1 or more (default 1), and `#`
/// begins a comment.
pub fn parse(text: &str) -> Result<Vec<Host>, String> {
    let mut hosts: Vec<Host> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let wrong = |why: &str| format!("line {}: {why}; it is HOST [slots=N]", number + 1);
        let mut words = line
            .split('#')
            .next()
            .unwrap_or_default()
            .split_whitespace();
        let Some(name) = words.next() else { continue };
        // ssh would parse such a name as an option.
        if name.starts_with('-') || name.contains('=') {
            return Err(wrong(&format!("\"{name}\" is no host")));
        }
        let mut slots = 1;
        for word in words {
            slots = word
                .strip_prefix("slots=")
                .and_then(|count| count.parse().ok())
                .filter(|count| (1..=4096).contains(count))
                .ok_or_else(|| wrong(&format!("\"{word}\" is not understood")))?;
        }
        if hosts.iter().any(|host| host.name == name) {
            return Err(wrong(&format!("{name} is there twice")));
        }
        hosts.push(Host {
            name: name.into(),
            slots,
        });
    }
    match hosts.is_empty() {
        true => Err("it names no host".into()),
        false => Ok(hosts),
    }
}

/// Returns the hosts with the number of ranks on each. Ranks fill the hosts in order, and the last
/// host possibly in part. Without `ranks` all slots are filled.
pub fn fill(mut hosts: Vec<Host>, ranks: Option<usize>) -> Result<Vec<Host>, String> {
    let slots: usize = hosts.iter().map(|host| host.slots).sum();
    let mut left = ranks.unwrap_or(slots);
    if left > slots {
        return Err(format!(
            "-n {left}, but the hosts have {slots} slots; raise slots=N in the file"
        ));
    }
    for host in &mut hosts {
        host.slots = host.slots.min(left);
        left -= host.slots;
    }
    hosts.retain(|host| host.slots > 0);
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_hosts_are_parsed_and_filled() {
        let host = |name: &str, slots| Host {
            name: name.into(),
            slots,
        };
        let text = "# two\nnode1 slots=4\n\n user@node2 # one\nnode3   slots=2\n";
        let hosts = parse(text).unwrap();
        let all = [host("node1", 4), host("user@node2", 1), host("node3", 2)];
        assert_eq!(hosts, all);
        assert_eq!(fill(hosts.clone(), None).unwrap(), all);
        assert_eq!(
            fill(hosts.clone(), Some(5)).unwrap(),
            [host("node1", 4), host("user@node2", 1)]
        );
        assert_eq!(fill(hosts.clone(), Some(2)).unwrap(), [host("node1", 2)]);
        assert!(fill(hosts, Some(8)).unwrap_err().contains("7 slots"));
        for (bad, part) in [
            ("", "no host"),
            ("a\na", "line 2: a is there twice"),
            ("a slots=0", "slots=0"),
            ("a b", "\"b\" is not understood"),
            ("-oProxyCommand=x", "is no host"),
            ("slots=4", "is no host"),
        ] {
            let error = parse(bad).unwrap_err();
            assert!(error.contains(part), "{bad}: {error}");
        }
    }
}

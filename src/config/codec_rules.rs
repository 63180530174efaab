//! Rules of `CINCH_CODEC_RULES`, which choose codecs by properties of communicators and of calls.

use super::kinds::{Parsed, parse_bytes};
use crate::types::{CodecSetting, Collective, DType};
use std::fmt;

/// Properties of a communicator by which rules choose. Its name stands in the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommFacts {
    /// Number of ranks.
    pub ranks: usize,
    /// Number of hosts.
    pub hosts: usize,
    /// Position in the order in which the process of rank 0 has created communicators, from 1.
    pub order: usize,
}

impl CommFacts {
    /// Returns the properties of the first communicator of a process.
    pub fn first(ranks: usize, hosts: usize) -> CommFacts {
        CommFacts {
            ranks,
            hosts,
            order: 1,
        }
    }
}

/// Numbers from `first` to `last`, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NumberRange {
    first: usize,
    last: Option<usize>,
}

/// Conditions of a rule on communicators.
#[derive(Clone, Debug, Default, PartialEq)]
struct CommConditions {
    ranks: Option<NumberRange>,
    hosts: Option<NumberRange>,
    order: Option<NumberRange>,
}

/// A set of collectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveSet(u16);

impl CollectiveSet {
    /// The collectives that carry gradients. Other collectives carry weights, tokens, indices and
    /// pickles.
    pub const GRADIENTS: CollectiveSet =
        CollectiveSet(1 << Collective::AllReduce as u16 | 1 << Collective::ReduceScatter as u16);

    /// Returns whether `one` is in the set.
    pub const fn has(self, one: Collective) -> bool {
        self.0 & 1 << one as u16 != 0
    }

    /// Parses names of collectives that are separated by `separator`.
    pub(super) fn parse(text: &str, separator: char) -> Parsed<CollectiveSet> {
        let mut bits = 0;
        for name in text.split(separator).map(str::trim) {
            let one = Collective::from_name(name)
                .ok_or_else(|| format!("no collective is called \"{name}\""))?;
            bits |= 1 << one as u16;
        }
        Ok(CollectiveSet(bits))
    }
}

impl fmt::Display for CollectiveSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut between = "";
        for one in Collective::ALL.into_iter().filter(|&one| self.has(one)) {
            write!(f, "{between}{one}")?;
            between = ",";
        }
        Ok(())
    }
}

/// A set of element types.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DTypeSet(Vec<DType>);

/// Conditions of a rule on calls. Without one, the settings of the process apply.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct CallConditions {
    /// Least bytes of a rank's input.
    pub(super) min_bytes: Option<usize>,
    /// Most bytes of a rank's input.
    pub(super) max_bytes: Option<usize>,
    pub(super) collectives: Option<CollectiveSet>,
    pub(super) dtypes: Option<DTypeSet>,
}

/// The effect of a rule on the communicators that it fits.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum RuleDecision {
    Off,
    Codec(CodecSetting, CallConditions),
}

/// A rule on communicators and calls.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pattern: String,
    conditions: CommConditions,
    pub(super) decision: RuleDecision,
}

/// Rules in order. The first one that fits a communicator applies, with those behind it that have the
/// same pattern and the same conditions on communicators.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CodecRules(Vec<Rule>);

impl CodecRules {
    /// Parses rules `PATTERN=off[:CONDITION...]` or `PATTERN=CODEC[:CONDITION...]`, separated by
    /// commas.
    pub(super) fn parse(text: &str) -> Parsed<CodecRules> {
        let mut rules: Vec<Rule> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let rule = Rule::parse(part).map_err(|why| format!("\"{part}\": {why}"))?;
            if let Some(earlier) = rules.iter().find(|earlier| earlier.hides(&rule)) {
                return Err(format!("\"{part}\" is never reached behind \"{earlier}\""));
            }
            rules.push(rule);
        }
        Ok(CodecRules(rules))
    }

    /// Returns the text of the first rule whose codec needs tensor ids, which calls would have to
    /// pass.
    pub(super) fn needing_tensor(&self) -> Option<String> {
        let needs = |rule: &&Rule| match &rule.decision {
            RuleDecision::Off => false,
            RuleDecision::Codec(codec, _) => codec.needs_tensor(),
        };
        self.0.iter().find(needs).map(Rule::to_string)
    }

    /// Returns the rules for a communicator with this name, in order; none if no rule fits.
    pub(super) fn of(&self, name: &str, facts: CommFacts) -> Vec<&Rule> {
        let fits = |rule: &&Rule| fits(&rule.pattern, name) && rule.conditions.fit(facts);
        let Some(at) = self.0.iter().position(|rule| fits(&rule)) else {
            return Vec::new();
        };
        let first = &self.0[at];
        let rest = self.0[at..].iter();
        rest.filter(|rule| rule.fits_as(first)).collect()
    }
}

impl fmt::Display for CodecRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules: Vec<String> = self.0.iter().map(Rule::to_string).collect();
        f.write_str(&rules.join(","))
    }
}

impl Rule {
    fn parse(text: &str) -> Parsed<Rule> {
        let (pattern, decision) = text
            .split_once('=')
            .ok_or("a rule is PATTERN=CODEC or PATTERN=off")?;
        let pattern = pattern.trim();
        if pattern.is_empty() {
            return Err("the pattern is empty; * fits every name".into());
        }
        let (mut spec, mut comms) = (Vec::new(), CommConditions::default());
        let mut calls = CallConditions::default();
        for part in decision.split(':').map(str::trim) {
            let condition = part.split_once('=');
            let is_known = match condition {
                Some((name, value)) => comms.set(name, value)? || calls.set(name, value)?,
                None => false,
            };
            if !is_known {
                spec.push(part);
            }
        }
        let decision = match (&spec[..], calls == CallConditions::default()) {
            (["off"], true) => RuleDecision::Off,
            (["off"], false) => {
                return Err(
                    "off is for all calls: min=, max=, for= and dtype= go with a codec, and \
                            other calls run without one"
                        .into(),
                );
            }
            _ => RuleDecision::Codec(parse_setting(&spec.join(":"))?, calls),
        };
        Ok(Rule {
            pattern: pattern.into(),
            conditions: comms,
            decision,
        })
    }

    /// Returns whether both rules fit the same communicators.
    fn fits_as(&self, other: &Rule) -> bool {
        self.pattern == other.pattern && self.conditions == other.conditions
    }

    /// Returns whether no call reaches `later` behind this rule. Detects only `*`, an equal pattern, and equal
    /// or no conditions.
    fn hides(&self, later: &Rule) -> bool {
        let any = self.conditions == CommConditions::default();
        let covers = (self.pattern == "*" || self.pattern == later.pattern)
            && (any || self.conditions == later.conditions);
        let leaves_calls = match (&self.decision, &later.decision) {
            (RuleDecision::Codec(_, own), RuleDecision::Codec(_, others)) => {
                self.fits_as(later) && *own != CallConditions::default() && own != others
            }
            _ => false,
        };
        covers && !leaves_calls
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}=", self.pattern)?;
        match &self.decision {
            RuleDecision::Off => write!(f, "off{}", self.conditions),
            RuleDecision::Codec(codec, calls) => write!(f, "{codec}{}{calls}", self.conditions),
        }
    }
}

impl CommConditions {
    /// Sets the condition `name`. Returns false if there is none of that name.
    fn set(&mut self, name: &str, value: &str) -> Parsed<bool> {
        let place = match name {
            "ranks" => &mut self.ranks,
            "hosts" => &mut self.hosts,
            "order" => &mut self.order,
            _ => return Ok(false),
        };
        once(
            place,
            name,
            NumberRange::parse(value).map_err(|why| format!("{name}={value}: {why}"))?,
        )
    }

    fn fit(&self, facts: CommFacts) -> bool {
        let has = |range: Option<NumberRange>, number| range.is_none_or(|range| range.has(number));
        has(self.ranks, facts.ranks) && has(self.hosts, facts.hosts) && has(self.order, facts.order)
    }
}

impl fmt::Display for CommConditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [
            ("ranks", self.ranks),
            ("hosts", self.hosts),
            ("order", self.order),
        ];
        let mut set = named
            .into_iter()
            .filter_map(|(name, range)| Some((name, range?)));
        set.try_for_each(|(name, range)| write!(f, ":{name}={range}"))
    }
}

impl CallConditions {
    /// Sets the condition `name`. Returns false if there is none of that name.
    fn set(&mut self, name: &str, value: &str) -> Parsed<bool> {
        match name {
            "min" => once(&mut self.min_bytes, name, parse_bytes(value)?)?,
            "max" => once(&mut self.max_bytes, name, parse_bytes(value)?)?,
            "for" => once(
                &mut self.collectives,
                name,
                CollectiveSet::parse(value, '+')?,
            )?,
            "dtype" => once(&mut self.dtypes, name, DTypeSet::parse(value)?)?,
            _ => return Ok(false),
        };
        match (self.min_bytes, self.max_bytes) {
            (Some(min), Some(max)) if min > max => Err(format!("min={min} is more than max={max}")),
            _ => Ok(true),
        }
    }
}

impl fmt::Display for CallConditions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in [("min", self.min_bytes), ("max", self.max_bytes)] {
            if let Some(bytes) = bytes {
                write!(f, ":{name}={bytes}")?;
            }
        }
        if let Some(set) = self.collectives {
            write!(f, ":for={}", set.to_string().replace(',', "+"))?;
        }
        self.dtypes
            .iter()
            .try_for_each(|set| write!(f, ":dtype={set}"))
    }
}

impl DTypeSet {
    pub(super) fn has(&self, one: DType) -> bool {
        self.0.contains(&one)
    }

    fn parse(text: &str) -> Parsed<DTypeSet> {
        let coded = || DType::ALL.into_iter().filter(|one| one.has_codecs());
        let named: Parsed<Vec<DType>> = text
            .split('+')
            .map(|name| {
                let one = coded().find(|one| one.to_string() == name.trim());
                one.ok_or_else(|| {
                    let all: Vec<String> = coded().map(|one| one.to_string()).collect();
                    format!("dtype={name}: codecs carry {}", all.join(", "))
                })
            })
            .collect();
        let named = named?;
        Ok(DTypeSet(
            coded().filter(|one| named.contains(one)).collect(),
        ))
    }
}

impl fmt::Display for DTypeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.0.iter().map(|one| one.to_string()).collect();
        f.write_str(&names.join("+"))
    }
}

impl NumberRange {
    /// Parses `N`, `N-` or `N-M`.
    fn parse(text: &str) -> Parsed<NumberRange> {
        let number = |digits: &str| -> Parsed<usize> {
            let digits = digits.trim();
            let number = digits.parse().ok().filter(|&number| number > 0);
            number.ok_or_else(|| format!("\"{digits}\" is no number above 0; write N, N- or N-M"))
        };
        let (first, last) = match text.split_once('-') {
            None => (number(text)?, Some(number(text)?)),
            Some((first, "")) => (number(first)?, None),
            Some((first, last)) => (number(first)?, Some(number(last)?)),
        };
        match last {
            Some(last) if last < first => Err(format!("{first} is more than {last}")),
            _ => Ok(NumberRange { first, last }),
        }
    }

    fn has(self, number: usize) -> bool {
        number >= self.first && self.last.is_none_or(|last| number <= last)
    }
}

impl fmt::Display for NumberRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.last {
            None => write!(f, "{}-", self.first),
            Some(last) if last == self.first => write!(f, "{last}"),
            Some(last) => write!(f, "{}-{last}", self.first),
        }
    }
}

/// Sets a condition that has no value yet.
fn once<T>(place: &mut Option<T>, name: &str, value: T) -> Parsed<bool> {
    match place.replace(value) {
        None => Ok(true),
        Some(_) => Err(format!("{name}= is set twice")),
    }
}

/// Parses the codec of a process or rule. On failure returns the parser's error message.
pub(super) fn parse_setting(text: &str) -> Parsed<CodecSetting> {
    let setting = text.trim().parse();
    setting.map_err(|error: crate::Error| error.message().to_string())
}

/// Returns whether a pattern matches a name: `*` stands for any text, `?` for one character.
fn fits(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) =
        (pattern.chars().collect(), name.chars().collect());
    // Holds the positions in pattern and name from which to retry when the text after the last `*`
    // does not match.
    let (mut at, mut seen, mut retry) = (0, 0, None);
    while seen < name.len() {
        match pattern.get(at) {
            Some('*') => {
                retry = Some((at + 1, seen));
                at += 1;
            }
            Some(&one) if one == '?' || one == name[seen] => {
                at += 1;
                seen += 1;
            }
            _ => match retry {
                Some((wildcard, from)) => {
                    retry = Some((wildcard, from + 1));
                    (at, seen) = (wildcard, from + 1);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&one| one == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pattern_fits_whole_name() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("*", "anything", true),
            ("dp*", "dp", true),
            ("dp*", "dp_0", true),
            ("dp*", "tdp", false),
            ("*dp", "tdp", true),
            ("*dp", "dp0", false),
            ("d?", "dp", true),
            ("d?", "d", false),
            ("a*b*c", "aXbXbYc", true),
            ("a*b*c", "aXbXbY", false),
            ("", "", true),
            ("ü?", "üß", true),
        ] {
            assert_eq!(fits(pattern, name), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn misspelt_rule_is_quoted_in_the_error() {
        for (text, reason) in [
            ("dp*", "PATTERN=CODEC"),
            ("=dynamic8", "pattern is empty"),
            ("dp*=dynamic9", "dynamic9"),
            ("dp*=of", "of"),
            ("dp*=dynamic8:blok=64", "blok"),
            ("dp*=dynamic8:min=1X", "byte count"),
            ("dp*=dynamic8:for=allreduce", "allreduce"),
            ("*=dynamic8,dp=off", "never reached"),
            ("*=dynamic8:min=1M,dp=off", "never reached"),
            ("dp=dynamic8:min=1M,dp=off", "never reached"),
            (
                "dp=dynamic8:ranks=2:min=1M,dp=linear8:ranks=2:min=1M",
                "never reached",
            ),
            ("dp=off:min=1M", "off is for all calls"),
            (
                "dp=linear8:min=2M:max=1M",
                "min=2097152 is more than max=1048576",
            ),
            ("dp=linear8:min=1M:min=2M", "set twice"),
            ("dp=linear8:dtype=f64", "codecs carry f16, f32, bf16"),
            ("dp=linear8:ranks=0", "no number above 0"),
            ("dp=linear8:ranks=8-2", "8 is more than 2"),
            ("dp=linear8:hosts=few", "write N, N- or N-M"),
            ("dp=linear8:order=1-2-3", "write N, N- or N-M"),
            ("dp=dynamic8,dp=off", "never reached"),
            ("dp=dynamic8,", "PATTERN=CODEC"),
            ("", "PATTERN=CODEC"),
        ] {
            let error = CodecRules::parse(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}

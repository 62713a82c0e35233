//! Masks against naive models: automata of another library, and languages written out.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;
use std::sync::Arc;

use octavo_grammar::{Grammar, Kind, Matcher, Vocabulary, gbnf_to_lark};
use proptest::prelude::*;
use regex_automata::dfa::{Automaton, StartKind, dense};
use regex_automata::util::primitives::StateID;
use regex_automata::util::start;

const EOS: [u32; 2] = [0, 9];

/// End tokens, a special one, one without bytes, the same bytes twice, and pieces of texts of a, b and c.
fn words() -> Vec<Vec<u8>> {
    let texts = [
        "<end>", "a", "b", "c", "ab", "ab", "", "<a>", "ba", "a", "bc", "abc", "cc", "bbb", "aba",
        "cab",
    ];
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

fn vocabulary() -> Vocabulary {
    Vocabulary::new(words(), |id| id == 7 || EOS.contains(&id), &EOS, false).unwrap()
}

fn mask(matcher: &mut Matcher) -> BTreeSet<u32> {
    let mut row = [u32::MAX; 2];
    matcher.mask(&mut row).unwrap();
    assert_eq!(row[1], 0);
    (0..32).filter(|token| row[0] >> token & 1 == 1).collect()
}

/// What tokens may be: those whose bytes keep `text` viable, and end tokens if it is accepted.
fn expected(text: &[u8], viable: &dyn Fn(&[u8]) -> bool, accepted: bool) -> BTreeSet<u32> {
    let words = words();
    let tokens = (0..words.len() as u32).filter(|&token| {
        let word = &words[token as usize];
        match token {
            7 => false,
            _ if EOS.contains(&token) => accepted,
            _ => !word.is_empty() && viable(&[text, word].concat()),
        }
    });
    tokens.collect()
}

/// Walk down `choices`, comparing every mask; clones go other ways without disturbing it.
fn walk(
    grammar: &Arc<Grammar>,
    choices: &[usize],
    viable: &dyn Fn(&[u8]) -> bool,
    accepted: &dyn Fn(&[u8]) -> bool,
) {
    let mut matcher = grammar.matcher();
    let mut text = Vec::new();
    for &choice in choices {
        let right = expected(&text, viable, accepted(&text));
        assert_eq!(mask(&mut matcher), right, "after {:?}", String::from_utf8_lossy(&text));
        let tokens: Vec<u32> = right.iter().copied().collect();
        let token = tokens[choice % tokens.len()];
        let mut other = matcher.clone();
        other.advance(tokens[(choice + 1) % tokens.len()]).unwrap();
        mask(&mut other);
        assert_eq!(mask(&mut matcher), right, "a clone went another way");
        matcher.advance(token).unwrap();
        if EOS.contains(&token) {
            for token in [0, 1, 9] {
                assert_eq!(mask(&mut matcher), BTreeSet::from(EOS), "once ended, ever after");
                matcher.advance(token).unwrap();
            }
            return;
        }
        text.extend_from_slice(&words()[token as usize]);
    }
}

struct Dfa(dense::DFA<Vec<u32>>);

impl Dfa {
    fn new(pattern: &str) -> Self {
        let config = dense::Config::new().minimize(true).start_kind(StartKind::Anchored);
        let pattern = format!("(?:{pattern})$");
        Self(dense::Builder::new().configure(config).build(&pattern).unwrap())
    }

    fn state(&self, text: &[u8]) -> StateID {
        let anchored = start::Config::new().anchored(regex_automata::Anchored::Yes);
        let begin = self.0.start_state(&anchored).unwrap();
        text.iter().fold(begin, |state, &byte| self.0.next_state(state, byte))
    }

    /// Some text that begins so matches: a match is found a byte late, so the state may be one that only ends.
    fn viable(&self, text: &[u8]) -> bool {
        let mut seen = BTreeSet::new();
        let mut left = vec![self.state(text)];
        while let Some(state) = left.pop() {
            if self.0.is_match_state(self.0.next_eoi_state(state)) {
                return true;
            }
            for byte in *b"abcd" {
                let next = self.0.next_state(state, byte);
                if !self.0.is_dead_state(next) && seen.insert(next) {
                    left.push(next);
                }
            }
        }
        false
    }

    fn accepts(&self, text: &[u8]) -> bool {
        self.0.is_match_state(self.0.next_eoi_state(self.state(text)))
    }
}

fn pattern() -> impl Strategy<Value = String> {
    let leaf = prop::sample::select(vec!["a", "b", "c", "ab", "[ab]", "[^a]", "(?:cab)?", "."]);
    let leaf = leaf.prop_map(|leaf| leaf.replace("[^a]", "[bc]").replace('.', "[abc]"));
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(|parts| parts.concat()),
            prop::collection::vec(inner.clone(), 1..4)
                .prop_map(|parts| format!("(?:{})", parts.join("|"))),
            (inner.clone(), prop::sample::select(vec!["*", "+", "?", "{2}", "{1,3}", "{2,}"]))
                .prop_map(|(inner, times)| format!("(?:{inner}){times}")),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn masks_of_a_pattern_are_those_of_an_automaton(
        pattern in pattern(),
        choices in prop::collection::vec(0..1000_usize, 12),
    ) {
        let dfa = Dfa::new(&pattern);
        let grammar = vocabulary().compile(Kind::Regex, &pattern).unwrap();
        walk(&grammar, &choices, &|text| dfa.viable(text), &|text| dfa.accepts(text));
    }

    #[test]
    fn masks_of_choices_are_their_beginnings(
        choices in prop::collection::vec("[abc]{0,6}", 1..8),
        steps in prop::collection::vec(0..1000_usize, 8),
    ) {
        let spec = serde_json::to_string(&choices).unwrap();
        let grammar = vocabulary().compile(Kind::Choice, &spec).unwrap();
        let begins = |text: &[u8]| choices.iter().any(|choice| choice.as_bytes().starts_with(text));
        let is = |text: &[u8]| choices.iter().any(|choice| choice.as_bytes() == text);
        walk(&grammar, &steps, &begins, &is);
    }

    #[test]
    fn masks_of_gbnf_are_those_of_its_language(
        grammar in gbnf(),
        choices in prop::collection::vec(0..1000_usize, 5),
    ) {
        check_gbnf(&grammar, &choices)?;
    }
}

/// A rule's body, to be written as GBNF and to be enumerated.
#[derive(Clone, Debug)]
enum Body {
    Text(&'static str),
    Class(&'static str),
    Seq(Vec<Self>),
    Alt(Vec<Self>),
    Many(Box<Self>, usize, usize),
    Rule(usize),
}

const LONGEST: usize = 6;
const RULES: usize = 3;

impl Body {
    fn text(&self) -> String {
        match self {
            Self::Text(text) => format!("{text:?}"),
            Self::Class(class) => format!("[{class}]"),
            Self::Seq(parts) => parts.iter().map(Self::text).collect::<Vec<_>>().join(" "),
            Self::Alt(options) => {
                format!("({})", options.iter().map(Self::text).collect::<Vec<_>>().join(" | "))
            }
            Self::Many(inner, 0, LONGEST) => format!("({})*", inner.text()),
            Self::Many(inner, 1, LONGEST) => format!("({})+", inner.text()),
            Self::Many(inner, 0, 1) => format!("({})?", inner.text()),
            Self::Many(inner, least, most) => format!("({}){{{least},{most}}}", inner.text()),
            Self::Rule(0) => "root".to_owned(),
            Self::Rule(rule) => format!("rule-{rule}"),
        }
    }

    /// All texts of at most `LONGEST` bytes, given those of the rules.
    fn texts(&self, rules: &[BTreeSet<String>]) -> BTreeSet<String> {
        match self {
            Self::Text(text) => BTreeSet::from([(*text).to_owned()]),
            Self::Class(class) => class.chars().map(String::from).collect(),
            Self::Seq(parts) => parts.iter().fold(BTreeSet::from([String::new()]), |all, part| {
                joined(&all, &part.texts(rules))
            }),
            Self::Alt(options) => options.iter().flat_map(|option| option.texts(rules)).collect(),
            Self::Many(inner, least, most) => {
                let inner = inner.texts(rules);
                let (mut all, mut power) = (BTreeSet::new(), BTreeSet::from([String::new()]));
                for times in 0..=*most {
                    if times >= *least {
                        all.extend(power.iter().cloned());
                    }
                    power = joined(&power, &inner);
                }
                all
            }
            Self::Rule(rule) => rules[*rule].clone(),
        }
    }
}

fn joined(before: &BTreeSet<String>, after: &BTreeSet<String>) -> BTreeSet<String> {
    let pairs = before.iter().flat_map(|one| {
        let fitting = after.iter().filter(|other| one.len() + other.len() <= LONGEST);
        fitting.map(move |other| format!("{one}{other}"))
    });
    pairs.collect()
}

fn body() -> impl Strategy<Value = Body> {
    let leaf = prop_oneof![
        prop::sample::select(vec!["a", "b", "c", "ab", "abc", "bc", ""]).prop_map(Body::Text),
        prop::sample::select(vec!["ab", "bc", "abc"]).prop_map(Body::Class),
        (0..RULES).prop_map(Body::Rule),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        let times = prop::sample::select(vec![(0, LONGEST), (1, LONGEST), (0, 1), (2, 3), (0, 2)]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 1..4).prop_map(Body::Seq),
            prop::collection::vec(inner.clone(), 1..4).prop_map(Body::Alt),
            (inner, times).prop_map(|(inner, (least, most))| Body::Many(
                Box::new(inner),
                least,
                most
            )),
        ]
    })
}

fn gbnf() -> impl Strategy<Value = Vec<Body>> {
    prop::collection::vec(body(), RULES)
}

fn check_gbnf(bodies: &[Body], choices: &[usize]) -> Result<(), TestCaseError> {
    let mut rules = vec![BTreeSet::new(); bodies.len()];
    loop {
        let next: Vec<_> = bodies.iter().map(|body| body.texts(&rules)).collect();
        if next == rules {
            break;
        }
        rules = next;
    }
    let lines = bodies
        .iter()
        .enumerate()
        .map(|(rule, body)| format!("{} ::= {}\n", Body::Rule(rule).text(), body.text()));
    let text: String = lines.collect();
    let lark = gbnf_to_lark(&text).unwrap();
    // Texts that are too long to be known of are left out: what is known must be allowed, and ends must be right.
    let grammar = match vocabulary().compile(Kind::Grammar, &text) {
        Ok(grammar) => grammar,
        Err(error) => {
            prop_assert!(rules[0].is_empty(), "{error}\n{text}\n{lark}");
            return Ok(());
        }
    };
    let begins = |text: &[u8]| rules[0].iter().any(|known| known.as_bytes().starts_with(text));
    let mut matcher = grammar.matcher();
    let mut written = Vec::new();
    for &choice in choices {
        let is = std::str::from_utf8(&written).is_ok_and(|text| rules[0].contains(text));
        let right = expected(&written, &begins, is);
        let masked = mask(&mut matcher);
        let at = String::from_utf8_lossy(&written).into_owned();
        prop_assert!(masked.is_superset(&right), "{right:?} in {masked:?}, {at:?}\n{text}\n{lark}");
        for end in EOS {
            prop_assert_eq!(masked.contains(&end), is, "{:?}\n{}\n{}", &at, &text, &lark);
        }
        let tokens: Vec<u32> = right.iter().copied().filter(|token| !EOS.contains(token)).collect();
        if tokens.is_empty() {
            break;
        }
        let token = tokens[choice % tokens.len()];
        matcher.advance(token).unwrap();
        written.extend_from_slice(&words()[token as usize]);
    }
    Ok(())
}

//! Masks cost microseconds: an answer of some hundred tokens under a schema, of a vocabulary as large as Qwen's.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use octavo_grammar::{Kind, Matcher, Vocabulary};

const TOKENS: usize = 151_936;

const SCHEMA: &str = r#"{
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string", "pattern": "^[A-Z][a-z]+$"}, "zip": {"type": ["string", "null"]}},
            "required": ["city"],
            "additionalProperties": false
        },
        "score": {"type": "number"},
        "kind": {"enum": ["person", "robot", "other"]}
    },
    "required": ["name", "age", "address"],
    "additionalProperties": false
}"#;

const ANSWER: &str = r#"{
  "name": "Ada Lovelace, countess of the first program and of more words that follow",
  "age": 36,
  "email": "ada@example.org",
  "tags": ["mathematics", "a poet's daughter", "engine"],
  "address": {"city": "London", "zip": "SW1"},
  "score": 12500.25,
  "kind": "person"
}"#;

/// All bytes, what JSON is made of, numbers, and words of syllables, with and without a space before them.
fn words() -> Vec<Vec<u8>> {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    for piece in ["{\"", "\":", "\": \"", "\",\n", "\"}", "},", "[\"", "\n\n", "\r\n", "  ", "    "]
    {
        words.push(piece.into());
    }
    words.extend((10..1000).map(|number: u32| number.to_string().into_bytes()));
    let starts = ["b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w"];
    let ends = ["a", "e", "i", "o", "u", "an", "er", "in", "on", "us"];
    let syllables: Vec<String> = starts
        .iter()
        .flat_map(|start| ends.iter().map(move |end| format!("{start}{end}")))
        .collect();
    let mut word = String::new();
    for number in 0.. {
        if words.len() == TOKENS - 1 {
            break;
        }
        let mut left = number / 3;
        word.clear();
        let _ = write!(word, "{}", [" ", "", " É"][number % 3]);
        loop {
            word.push_str(&syllables[left % syllables.len()]);
            left /= syllables.len();
            if left == 0 {
                break;
            }
        }
        words.push(word.clone().into_bytes());
    }
    words.push(b"<end>".to_vec());
    words
}

/// The answer in the longest tokens there are.
fn tokens(words: &[Vec<u8>]) -> Vec<u32> {
    let ids: BTreeMap<&[u8], u32> = words.iter().map(Vec::as_slice).zip(0..).collect();
    let (mut rest, mut tokens) = (ANSWER.as_bytes(), Vec::new());
    while !rest.is_empty() {
        let longest = (1..=rest.len().min(24)).rev().find(|&len| ids.contains_key(&rest[..len]));
        let len = longest.expect("every byte is a token");
        tokens.push(ids[&rest[..len]]);
        rest = &rest[len..];
    }
    tokens
}

fn follow(mut matcher: Matcher, tokens: &[u32], row: &mut [u32]) -> Matcher {
    for &token in tokens {
        matcher.mask(row).expect("no limit is met");
        assert!(row[token as usize / 32] >> (token % 32) & 1 == 1, "the answer fits");
        matcher.advance(token).expect("allowed");
    }
    matcher
}

fn bench_masks(c: &mut Criterion) {
    let words = words();
    let tokens = tokens(&words);
    let end = TOKENS as u32 - 1;
    let vocabulary = Vocabulary::new(words, |id| id == end, &[end], false).expect("good tokens");
    let mut row = vec![0; TOKENS.div_ceil(32)];
    let mut group = c.benchmark_group(format!("masks_of_{}_tokens", tokens.len()));
    for (name, kind, spec) in [
        ("schema", Kind::Json, SCHEMA),
        ("any object", Kind::JsonObject, ""),
        ("pattern", Kind::Regex, r"(?s)\{.*\}"),
    ] {
        let grammar = vocabulary.compile(kind, spec).expect("a good specification");
        group.bench_function(name, |b| {
            let matcher = || grammar.matcher();
            b.iter_batched(matcher, |it| follow(it, &tokens, &mut row), BatchSize::LargeInput);
        });
        group.bench_function(format!("{name}, a new matcher"), |b| {
            b.iter(|| black_box(grammar.matcher()));
        });
    }
}

criterion_group!(benches, bench_masks);
criterion_main!(benches);

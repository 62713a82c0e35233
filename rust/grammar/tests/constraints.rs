//! The masks of many answers at once, and what one that fails leaves to the others.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::thread;

use octavo_grammar::{BadWords, Constraints, Kind, Rules, Vocabulary};

const A: u32 = 0;
const B: u32 = 1;
const C: u32 = 2;
const END: u32 = 40;

/// a, b, c, an end token, and tokens that nothing here allows; 41 of them, so that a row is two words.
fn vocabulary() -> Arc<Vocabulary> {
    let words =
        (0..=END).map(|id| if id < 3 { vec![b'a' + id as u8] } else { vec![b'z'; id as usize] });
    Arc::new(Vocabulary::new(words.collect(), |_| false, &[END], false).unwrap())
}

fn rules(vocabulary: &Vocabulary, pattern: &str) -> Rules {
    Rules { grammar: Some(vocabulary.compile(Kind::Regex, pattern).unwrap()), ..Rules::default() }
}

/// Rows with three words where two would do, each filled on a thread of its own.
fn fill(constraints: &Constraints, keys: &[(i64, usize)]) -> (Vec<Vec<u32>>, Vec<(usize, String)>) {
    let mut rows = vec![u32::MAX; keys.len() * 3];
    let failed = constraints.fill(keys, &mut rows, 3, |items, body| {
        thread::scope(|scope| {
            for item in 0..items {
                scope.spawn(move || body(item));
            }
        });
    });
    let tokens = rows.chunks(3).map(|row| {
        assert_eq!(row[2], 0, "past the vocabulary there is nothing");
        (0..64)
            .filter(|token| row[token / 32] >> (token % 32) & 1 == 1)
            .map(|token| token as u32)
            .collect()
    });
    (tokens.collect(), failed)
}

#[test]
fn one_answer_that_fails_leaves_the_others_alone() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    // No token writes the d that has to follow, which shows after two steps.
    constraints.add(1, 2, rules(&vocabulary, "aa(b|d)|ab|aacd")).unwrap();
    constraints.add(2, 1, rules(&vocabulary, "a{3}")).unwrap();
    let keys = [(1, 1), (2, 0), (1, 0)];
    assert_eq!(fill(&constraints, &keys), (vec![vec![A]; 3], vec![]));
    assert_eq!(constraints.advance([(2, 0, A), (1, 0, A), (1, 1, A)]), []);
    assert_eq!(fill(&constraints, &keys), (vec![vec![A, B], vec![A], vec![A, B]], vec![]));
    constraints.advance([(1, 0, A), (1, 1, B), (2, 0, A)]);
    assert_eq!(fill(&constraints, &keys), (vec![vec![END], vec![A], vec![B, C]], vec![]));
    constraints.advance([(1, 0, C), (1, 1, END), (2, 0, A)]);
    let (rows, failed) = fill(&constraints, &keys);
    assert_eq!(rows, [[END], [END], [END]]);
    assert_eq!(failed.len(), 1);
    assert_eq!(failed[0].0, 2);
    assert!(failed[0].1.contains("no token that could come next"), "{}", failed[0].1);
    assert_eq!(fill(&constraints, &keys), (vec![vec![END]; 3], vec![]), "told of once");
}

/// To meet a limit may take long, and the request ends at the first: the others do not meet it again.
#[test]
fn answers_of_a_request_that_failed_are_not_followed() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    let allowed = Some(vec![B]);
    constraints.add(1, 50, Rules { allowed, ..rules(&vocabulary, "ac?") }).unwrap();
    constraints.add(2, 2, rules(&vocabulary, "a")).unwrap();
    let mut keys: Vec<_> = (0..50).map(|answer| (1, answer)).collect();
    keys.push((2, 0));
    let mut rows = vec![0; keys.len() * 2];
    let one_by_one = |items: usize, body: &(dyn Fn(usize) + Sync)| (0..items).for_each(body);
    let failed = constraints.fill(&keys, &mut rows, 2, one_by_one);
    assert_eq!(failed.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
    assert!(rows[..100].chunks(2).all(|row| row == [0, 1 << (END - 32)]));
    assert_eq!(rows[100..], [1 << A, 0]);
    let failed = constraints.advance([(2, 0, B), (1, 0, C), (2, 1, B)]);
    assert_eq!(failed.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0]);
}

/// A grammar of so many meanings slows down every step of the requests beside it.
#[test]
fn a_grammar_that_takes_too_long_ends_its_request() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    let endings: Vec<_> = (0..100).map(|i| format!("a a \"b{}\"?", "c".repeat(i))).collect();
    let grammar = format!("start: a\na: {} | \"a\"", endings.join(" | "));
    let grammar = Some(vocabulary.compile(Kind::Grammar, &grammar).unwrap());
    constraints.add(1, 1, Rules { grammar, ..Rules::default() }).unwrap();
    let (mut failed, mut steps) = (Vec::new(), 0);
    while failed.is_empty() {
        steps += 1;
        // As many meanings as steps, at least.
        assert!(steps < 1000);
        failed = fill(&constraints, &[(1, 0)]).1;
        failed.extend(constraints.advance([(1, 0, A)]));
    }
    let told = ["takes too long", "items"];
    assert!(told.iter().any(|words| failed[0].1.contains(words)), "{failed:?}");
    assert_eq!(fill(&constraints, &[(1, 0)]), (vec![vec![END]], vec![]));
}

#[test]
fn a_token_that_was_not_allowed_is_told_of() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    constraints.add(5, 1, rules(&vocabulary, "ab")).unwrap();
    for (token, message) in [(C, "doesn't satisfy"), (END, "end token"), (50, "no text")] {
        constraints.remove(5);
        constraints.add(5, 1, rules(&vocabulary, "ab")).unwrap();
        let failed = constraints.advance([(4, 0, A), (5, 1, A), (5, 0, token), (5, 0, A)]);
        assert_eq!(failed.len(), 1, "{failed:?}");
        assert_eq!(failed[0].0, 2);
        assert!(failed[0].1.contains(message), "{}", failed[0].1);
        assert_eq!(fill(&constraints, &[(5, 0)]), (vec![vec![END]], vec![]));
    }
    let (rows, failed) = fill(&constraints, &[(9, 0), (5, 1)]);
    assert_eq!(rows, [[END], [END]]);
    assert!(failed.iter().all(|(_, message)| message.contains("not known")) && failed.len() == 2);
}

#[test]
fn many_answers_of_one_request_are_independent() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    constraints.add(1, 40, rules(&vocabulary, "[abc]{0,20}")).unwrap();
    let keys: Vec<_> = (0..40).map(|answer| (1, answer)).collect();
    for step in 0..=20 {
        let (rows, failed) = fill(&constraints, &keys);
        assert!(failed.is_empty());
        for (answer, row) in rows.iter().enumerate() {
            let written = step.min(answer);
            let right: &[u32] = if written == 20 { &[END] } else { &[A, B, C, END] };
            assert_eq!(row, right, "answer {answer} at step {step}");
        }
        let going_on = keys.iter().filter(|(_, answer)| *answer > step);
        constraints.advance(going_on.map(|&(request, answer)| (request, answer, A)));
    }
}

#[test]
fn lists_and_grammars_meet() {
    let vocabulary = vocabulary();
    let mut constraints = Constraints::new(vocabulary.clone());
    let bad = |sequences: &[&[u32]]| {
        BadWords::new(&sequences.iter().map(|one| one.to_vec()).collect::<Vec<_>>())
    };
    let bare = Rules { bad_words: bad(&[&[A, B], &[C], &[]]), ..Rules::default() };
    constraints.add(1, 1, bare).unwrap();
    let allowed = Rules { allowed: Some(vec![C, A]), ..Rules::default() };
    constraints.add(2, 1, Rules { bad_words: bad(&[&[A], &[C]]), ..allowed.clone() }).unwrap();
    constraints
        .add(3, 1, Rules { allowed: Some(vec![A]), ..rules(&vocabulary, "a?[bc]|a") })
        .unwrap();
    constraints.add(4, 1, Rules { allowed: Some(vec![A]), ..rules(&vocabulary, "ab") }).unwrap();
    let keys = [(1, 0), (2, 0), (3, 0), (4, 0)];
    let (rows, failed) = fill(&constraints, &keys);
    assert_eq!(rows[0], (0..=END).filter(|&id| id != C).collect::<Vec<_>>());
    assert_eq!(rows[1..], [vec![A, C], vec![A], vec![A]], "bad words never leave nothing");
    assert!(failed.is_empty());
    constraints.advance([(1, 0, A), (3, 0, A), (4, 0, A)]);
    let (rows, failed) = fill(&constraints, &keys);
    assert_eq!(rows[0], (0..=END).filter(|id| ![B, C].contains(id)).collect::<Vec<_>>());
    assert_eq!(rows[2..], [[END], [END]]);
    assert_eq!(failed.len(), 1);
    assert!(failed[0].0 == 3 && failed[0].1.contains("allowed_token_ids"));
    assert_eq!(fill(&constraints, &keys[2..]), (vec![vec![END]; 2], vec![]), "told of once");
    constraints.remove(1);
    constraints.remove(1);
    assert!(!constraints.contains(1) && constraints.contains(2) && constraints.len() == 3);
}

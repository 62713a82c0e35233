//! The text stream against a model that looks at the whole string at once.

use octavo_core::text::{TextStream, TokenTable};
use proptest::prelude::*;

/// Pieces that meet, overlap and break in every way that matters: characters of 1 to 4 bytes, their parts, bytes that
/// are never valid, surrogates, overlong forms, combining marks, joined emoji.
const PIECES: &[&[u8]] = &[
    b"a",
    b"b",
    b"ab",
    b"aab",
    b" ",
    b"\n\n",
    b"</s>",
    "é".as_bytes(),
    "e\u{301}".as_bytes(),
    "中文".as_bytes(),
    "한국".as_bytes(),
    "\u{1112}\u{1161}\u{11ab}".as_bytes(),
    "👩‍👩‍👧".as_bytes(),
    "🙂".as_bytes(),
    b"\xf0\x9f",
    b"\x99\x82",
    b"\xe4",
    b"\xb8\xad",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80",
    b"\xff",
    b"\x80",
    "\u{FFFD}".as_bytes(),
];

fn text() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        6 => proptest::sample::select(PIECES).prop_map(<[u8]>::to_vec),
        1 => proptest::collection::vec(any::<u8>(), 1..4),
    ];
    proptest::collection::vec(piece, 0..24).prop_map(|pieces| pieces.concat())
}

fn stops() -> impl Strategy<Value = Vec<Vec<u8>>> {
    let piece = proptest::sample::select(&PIECES[..14]).prop_map(<[u8]>::to_vec);
    let stop = proptest::collection::vec(piece, 1..4).prop_map(|pieces| pieces.concat());
    proptest::collection::vec(stop, 0..4)
}

/// Cut `bytes` into tokens of the given lengths, over and over.
fn cut(bytes: &[u8], lengths: &[usize]) -> Vec<Vec<u8>> {
    let mut tokens = Vec::new();
    let mut rest = bytes;
    for &length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (token, tail) = rest.split_at(length.min(rest.len()));
        tokens.push(token.to_vec());
        rest = tail;
    }
    tokens
}

/// The end that is complete first, the longest of those: found by trying every place.
fn naive_stop(text: &str, stops: &[Vec<u8>]) -> Option<(usize, usize, u32)> {
    (1..=text.len()).find_map(|end| {
        let ends_here = |stop: &[u8]| text.as_bytes()[..end].ends_with(stop);
        let longest = stops.iter().filter(|stop| ends_here(stop)).map(Vec::len).max()?;
        let index = stops.iter().position(|stop| stop.len() == longest && ends_here(stop))?;
        Some((end - longest, end, index as u32))
    })
}

/// Everything released, after each token and at the end.
struct Run {
    pieces: Vec<Vec<u8>>,
    text: String,
    stop: Option<u32>,
}

fn run(table: &TokenTable, tokens: &[u32], mut stream: TextStream, check_from: usize) -> Run {
    let mut run = Run { pieces: Vec::new(), text: String::new(), stop: None };
    for (position, &token) in tokens.iter().enumerate() {
        let mut out = Vec::new();
        run.stop = stream.push(table, token, position >= check_from, &mut out);
        run.text += std::str::from_utf8(&out).expect("every piece is valid UTF-8");
        run.pieces.push(out);
        if run.stop.is_some() {
            break;
        }
    }
    let mut out = Vec::new();
    stream.finish(&mut out);
    run.text += std::str::from_utf8(&out).expect("the last piece is valid UTF-8");
    run.pieces.push(out);
    run
}

fn table_of(tokens: &[Vec<u8>]) -> (TokenTable, Vec<u32>) {
    (TokenTable::new(tokens, &vec![0; tokens.len()], false), (0..tokens.len() as u32).collect())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn pieces_join_to_the_text_decoded_at_once(bytes in text(), lengths in proptest::collection::vec(1usize..7, 1..6)) {
        let (table, ids) = table_of(&cut(&bytes, &lengths));
        let whole = String::from_utf8_lossy(&bytes);
        let run = run(&table, &ids, TextStream::new(Vec::new(), false, true), 0);
        prop_assert_eq!(&run.text, &whole);
        prop_assert_eq!(table.decode(ids, true), whole.as_bytes());
    }

    #[test]
    fn the_first_complete_stop_text_cuts_exactly(
        bytes in text(),
        stops in stops(),
        lengths in proptest::collection::vec(1usize..7, 1..6),
        include_stop: bool,
    ) {
        let (table, ids) = table_of(&cut(&bytes, &lengths));
        let whole = String::from_utf8_lossy(&bytes);
        let run = run(&table, &ids, TextStream::new(stops.clone(), include_stop, true), 0);
        if let Some((start, end, index)) = naive_stop(&whole, &stops) {
            prop_assert_eq!(run.stop, Some(index));
            prop_assert_eq!(&run.text, &whole[..if include_stop { end } else { start }]);
        } else {
            prop_assert_eq!(run.stop, None);
            prop_assert_eq!(&run.text, &whole);
        }
    }

    #[test]
    fn no_more_is_held_back_than_may_still_change(
        bytes in text(),
        stops in stops(),
        lengths in proptest::collection::vec(1usize..7, 1..6),
    ) {
        let tokens = cut(&bytes, &lengths);
        let (table, ids) = table_of(&tokens);
        let run = run(&table, &ids, TextStream::new(stops.clone(), false, true), usize::MAX);
        prop_assert_eq!(run.stop, None);
        let mut seen = Vec::new();
        let mut released = 0;
        for (token, piece) in tokens.iter().zip(&run.pieces) {
            seen.extend_from_slice(token);
            released += piece.len();
            // What is decided so far: all but an incomplete character.
            let incomplete = (1..=seen.len().min(3))
                .find(|&n| matches!(std::str::from_utf8(&seen[seen.len() - n..]), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none()))
                .unwrap_or(0);
            let decided = String::from_utf8_lossy(&seen[..seen.len() - incomplete]).into_owned().into_bytes();
            let held = stops
                .iter()
                .flat_map(|stop| (1..stop.len()).filter(|&n| decided.ends_with(&stop[..n])))
                .max()
                .unwrap_or(0);
            prop_assert_eq!(released, decided.len() - held);
        }
    }

    #[test]
    fn special_tokens_are_skipped_or_shown(flags in proptest::collection::vec(0u8..2, 1..12)) {
        let tokens: Vec<Vec<u8>> = (0..flags.len()).map(|id| format!("<{id}>").into_bytes()).collect();
        let table = TokenTable::new(&tokens, &flags, false);
        let ids = 0..tokens.len() as u32;
        let shown: Vec<u8> = tokens.concat();
        let skipped: Vec<u8> = tokens.iter().zip(&flags).filter(|(_, flag)| **flag == 0).flat_map(|(t, _)| t.clone()).collect();
        prop_assert_eq!(table.decode(ids.clone(), false), shown);
        prop_assert_eq!(table.decode(ids, true), skipped);
    }
}

fn strings(texts: &[&str]) -> Vec<Vec<u8>> {
    texts.iter().map(|text| text.as_bytes().to_vec()).collect()
}

#[test]
fn a_stop_text_spans_tokens_and_begins_in_text_held_back() {
    let (table, ids) = table_of(&strings(&["one", " EN", "D", " two"]));
    let run = run(&table, &ids, TextStream::new(strings(&["END"]), false, true), 0);
    assert_eq!(run.stop, Some(0));
    assert_eq!(run.text, "one ");
    assert_eq!(run.pieces[1], b" ", "only what could become the stop text is held back");
}

#[test]
fn text_held_back_is_released_when_the_stop_text_does_not_come() {
    let (table, ids) = table_of(&strings(&["aaa", "a", "b"]));
    let run = run(&table, &ids, TextStream::new(strings(&["aaac"]), false, true), 0);
    assert_eq!(run.text, "aaaab");
    assert_eq!(run.pieces, [b"".to_vec(), b"a".to_vec(), b"aaab".to_vec(), b"".to_vec()]);
}

#[test]
fn before_the_minimum_a_stop_text_is_plain_text() {
    let (table, ids) = table_of(&strings(&["xEND", "yE", "ND", "z"]));
    let run = run(&table, &ids, TextStream::new(strings(&["END"]), false, true), 2);
    assert_eq!(
        run.stop,
        Some(0),
        "a stop text that begins before the minimum and ends after it counts"
    );
    assert_eq!(run.text, "xENDy");
}

#[test]
fn ties_go_to_the_longest_and_then_to_the_first_named() {
    let (table, ids) = table_of(&strings(&["abc"]));
    let first = |stops: &[&str]| run(&table, &ids, TextStream::new(strings(stops), false, true), 0);
    let longest = first(&["c", "bc"]);
    assert_eq!((longest.stop, longest.text.as_str()), (Some(1), "a"));
    assert_eq!(first(&["", "bc", "bc"]).stop, Some(1));
    let complete_first = first(&["abc", "b"]);
    assert_eq!((complete_first.stop, complete_first.text.as_str()), (Some(1), "a"));
}

#[test]
fn a_stop_text_is_sought_in_the_text_as_it_is_shown() {
    let (table, ids) = table_of(&[b"a\xff".to_vec(), b"b".to_vec(), b"c".to_vec()]);
    for stop in [b"\xffb".to_vec(), "\u{FFFD}b".as_bytes().to_vec()] {
        let run = run(&table, &ids, TextStream::new(vec![stop], false, true), 0);
        assert_eq!((run.stop, run.text.as_str()), (Some(0), "a"));
    }
}

#[test]
fn nothing_follows_a_stop() {
    let (table, _) = table_of(&strings(&["END", "more"]));
    let mut stream = TextStream::new(strings(&["END"]), true, true);
    let mut out = Vec::new();
    assert_eq!(stream.push(&table, 0, true, &mut out), Some(0));
    assert_eq!(stream.push(&table, 1, true, &mut out), None);
    stream.finish(&mut out);
    assert_eq!(out, b"END");
}

#[test]
fn a_fork_goes_its_own_way() {
    let (table, _) = table_of(&strings(&["E", "ND", "x"]));
    let mut stream = TextStream::new(strings(&["END"]), false, true);
    let mut out = Vec::new();
    stream.push(&table, 0, true, &mut out);
    let mut fork = stream.clone();
    assert_eq!(stream.push(&table, 1, true, &mut out), Some(0));
    assert_eq!(fork.push(&table, 2, true, &mut out), None);
    assert_eq!(out, b"Ex");
}

#[test]
fn only_the_very_first_space_is_dropped() {
    let tokens = strings(&["<s>", "", " ", " Hello", " world"]);
    let table = TokenTable::new(&tokens, &[1, 0, 0, 0, 0], true);
    assert_eq!(table.decode([0, 3, 4], true), b"Hello world");
    assert_eq!(table.decode([1, 2, 3], true), b" Hello");
    assert_eq!(table.decode([0, 3], false), b"<s> Hello");
}

#[test]
fn an_id_past_the_table_stands_for_nothing() {
    let (table, _) = table_of(&strings(&["a", "b"]));
    assert_eq!(table.len(), 2);
    assert_eq!(table.bytes(1), b"b");
    assert_eq!(table.bytes(2), b"");
    assert_eq!(table.bytes(u32::MAX), b"");
    assert!(!table.is_special(u32::MAX));
    assert_eq!(table.decode([0, 7, u32::MAX, 1], true), b"ab");
}

//! The parser.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::str::Chars;

use super::{Gbnf, Node, NodeId};
use crate::error::Error;

/// Parentheses within parentheses, and repetitions of repetitions.
const MAX_NESTING: usize = 64;
/// The largest count of a repetition.
const MAX_COUNT: u32 = 100_000;
const LAST_CHAR: u32 = 0x0010_FFFF;

/// Characters of a rule's name.
pub(super) fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || matches!(character, '-' | '_' | '.')
}

/// Read a grammar.
pub(super) fn parse(text: &str) -> Result<Gbnf, Error> {
    let mut parser = Parser {
        text,
        rest: text.chars().peekable(),
        at: 0,
        gbnf: Gbnf::default(),
        names: BTreeMap::new(),
        nesting: 0,
    };
    let mut bodies = BTreeMap::new();
    parser.blanks();
    while parser.rest.peek().is_some() {
        let begin = parser.at;
        let Some(name) = parser.definition() else {
            return Err(parser.wrong("a rule's name and ::= are expected"));
        };
        let rule = parser.rule(&name, begin);
        let body = parser.alternatives()?;
        if bodies.insert(rule, body).is_some() {
            return Err(wrong_at(text, begin, &format!("the rule {name} is defined twice")));
        }
    }
    let Parser { mut gbnf, names, .. } = parser;
    if let Some((name, &(_, place))) =
        names.iter().find(|(_, (rule, _))| !bodies.contains_key(rule))
    {
        return Err(wrong_at(text, place, &format!("there is no rule {name}")));
    }
    gbnf.rules = bodies.into_values().collect();
    let Some(&(root, _)) = names.get("root") else {
        return Err(Error::specification("the grammar has no rule root"));
    };
    gbnf.root = root;
    Ok(gbnf)
}

fn wrong_at(text: &str, at: usize, what: &str) -> Error {
    let before = &text[..at];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    Error::specification(format!("the grammar, line {line}, column {column}: {what}"))
}

struct Parser<'a> {
    text: &'a str,
    rest: Peekable<Chars<'a>>,
    /// Bytes read.
    at: usize,
    gbnf: Gbnf,
    /// A rule's number, and where it was named first.
    names: BTreeMap<String, (usize, usize)>,
    nesting: usize,
}

impl Parser<'_> {
    fn wrong(&self, what: &str) -> Error {
        wrong_at(self.text, self.at, what)
    }

    fn next(&mut self) -> Option<char> {
        let character = self.rest.next()?;
        self.at += character.len_utf8();
        Some(character)
    }

    fn take(&mut self, wanted: char) -> bool {
        let there = self.rest.peek() == Some(&wanted);
        if there {
            self.next();
        }
        there
    }

    /// Skip blanks, line breaks and comments.
    fn blanks(&mut self) {
        while let Some(&character) = self.rest.peek() {
            if character == '#' {
                while self.rest.peek().is_some_and(|&character| character != '\n') {
                    self.next();
                }
            } else if character.is_whitespace() {
                self.next();
            } else {
                return;
            }
        }
    }

    /// A rule's name and `::=`, or nothing read.
    fn definition(&mut self) -> Option<String> {
        let rest = &self.text[self.at..];
        let name = rest.split(|character| !is_name(character)).next().unwrap_or_default();
        let after = rest[name.len()..].trim_start_matches([' ', '\t']);
        let after = after.strip_prefix("::=")?;
        if name.is_empty() {
            return None;
        }
        let end = self.text.len() - after.len();
        while self.at < end {
            self.next();
        }
        self.blanks();
        Some(name.to_owned())
    }

    fn rule(&mut self, name: &str, at: usize) -> usize {
        let number = self.names.len();
        self.names.entry(name.to_owned()).or_insert((number, at)).0
    }

    fn alternatives(&mut self) -> Result<NodeId, Error> {
        self.blanks();
        let mut options = vec![self.sequence()?];
        while self.take('|') {
            self.blanks();
            options.push(self.sequence()?);
        }
        if options.len() == 1 {
            return Ok(options[0]);
        }
        Ok(self.gbnf.add(Node::Alt(options)))
    }

    fn sequence(&mut self) -> Result<NodeId, Error> {
        let mut items = Vec::new();
        loop {
            // A name may begin the next rule.
            let rest = &self.text[self.at..];
            let name = rest.split(|character| !is_name(character)).next().unwrap_or_default();
            if !name.is_empty()
                && rest[name.len()..].trim_start_matches([' ', '\t']).starts_with("::=")
            {
                break;
            }
            let Some(item) = self.item()? else { break };
            self.blanks();
            let item = self.repeated(item)?;
            items.push(item);
        }
        if items.len() == 1 {
            return Ok(items[0]);
        }
        Ok(self.gbnf.add(Node::Seq(items)))
    }

    fn item(&mut self) -> Result<Option<NodeId>, Error> {
        let at = self.at;
        let Some(&character) = self.rest.peek() else { return Ok(None) };
        match character {
            '"' => {
                self.next();
                let mut items = Vec::new();
                while !self.take('"') {
                    let character = self.character('"')?;
                    items.push(self.gbnf.add(Node::Chars(vec![(character, character)])));
                }
                Ok(Some(self.gbnf.add(Node::Seq(items))))
            }
            '[' => {
                self.next();
                let ranges = self.class()?;
                if ranges.is_empty() {
                    return Err(wrong_at(self.text, at, "no character is in these brackets"));
                }
                Ok(Some(self.gbnf.add(Node::Chars(ranges))))
            }
            '.' => {
                self.next();
                Ok(Some(self.gbnf.add(Node::Chars(inverted(&[])))))
            }
            '(' => {
                self.next();
                if self.rest.peek() == Some(&'=') {
                    return Err(self.wrong("look-ahead is not supported"));
                }
                self.nesting += 1;
                if self.nesting > MAX_NESTING {
                    return Err(
                        self.wrong(&format!("more than {MAX_NESTING} levels of parentheses"))
                    );
                }
                let inner = self.alternatives()?;
                self.nesting -= 1;
                if !self.take(')') {
                    return Err(self.wrong("a closing parenthesis is expected"));
                }
                Ok(Some(inner))
            }
            '<' | '!' => Err(self.wrong("tokens cannot be named in this notation; use Lark")),
            _ if is_name(character) => {
                let mut name = String::new();
                while let Some(&character) =
                    self.rest.peek().filter(|&&character| is_name(character))
                {
                    name.push(character);
                    self.next();
                }
                let rule = self.rule(&name, at);
                Ok(Some(self.gbnf.add(Node::Rule(rule))))
            }
            '|' | ')' => Ok(None),
            _ => Err(self.wrong(&format!("{character:?} is not expected"))),
        }
    }

    fn repeated(&mut self, mut item: NodeId) -> Result<NodeId, Error> {
        for _ in 0..MAX_NESTING {
            let (least, most) = match self.rest.peek() {
                Some('*') => (0, None),
                Some('+') => (1, None),
                Some('?') => (0, Some(1)),
                Some('{') => (0, Some(0)),
                _ => return Ok(item),
            };
            self.next();
            let (least, most) = if most == Some(0) { self.counts()? } else { (least, most) };
            item = self.gbnf.add(Node::Repeat(item, least, most));
            self.blanks();
        }
        Err(self.wrong(&format!("more than {MAX_NESTING} repetitions of one another")))
    }

    fn counts(&mut self) -> Result<(u32, Option<u32>), Error> {
        self.blanks();
        let least = self.count()?;
        self.blanks();
        let most = if self.take(',') {
            self.blanks();
            self.count()?
        } else if least.is_none() {
            return Err(self.wrong("a number is expected"));
        } else {
            least
        };
        self.blanks();
        if !self.take('}') {
            return Err(self.wrong("a closing brace is expected"));
        }
        let least = least.unwrap_or(0);
        if most.is_some_and(|most| most < least) {
            return Err(self.wrong("the repetition's second number is smaller than its first"));
        }
        Ok((least, most))
    }

    fn count(&mut self) -> Result<Option<u32>, Error> {
        let mut count = None;
        while let Some(digit) = self.rest.peek().and_then(|character| character.to_digit(10)) {
            let value = count.unwrap_or(0) * 10 + digit;
            if value > MAX_COUNT {
                return Err(self.wrong(&format!("a repetition's count may be {MAX_COUNT} at most")));
            }
            count = Some(value);
            self.next();
        }
        Ok(count)
    }

    fn class(&mut self) -> Result<Vec<(u32, u32)>, Error> {
        let negated = self.take('^');
        let mut ranges = Vec::new();
        while !self.take(']') {
            let first = self.character(']')?;
            let mut last = first;
            let mut ahead = self.rest.clone();
            if ahead.next() == Some('-') && ahead.next().is_some_and(|character| character != ']') {
                self.next();
                last = self.character(']')?;
                if last < first {
                    return Err(self.wrong("the range's end comes before its beginning"));
                }
            }
            ranges.push((first, last));
        }
        Ok(if negated { inverted(&ranges) } else { normalized(&ranges) })
    }

    /// One character of a literal or a class, after its escape.
    fn character(&mut self, end: char) -> Result<u32, Error> {
        let Some(character) = self.next() else {
            return Err(self.wrong(&format!("the text ends before {end}")));
        };
        if character != '\\' {
            return Ok(character.into());
        }
        let Some(escaped) = self.next() else {
            return Err(self.wrong("the text ends in an escape"));
        };
        let digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t'.into()),
            'r' => return Ok('\r'.into()),
            'n' => return Ok('\n'.into()),
            'f' => return Ok(0x0C),
            'b' => return Ok(0x08),
            '0' => return Ok(0),
            _ if escaped.is_ascii_alphanumeric() => {
                return Err(self.wrong(&format!("the escape \\{escaped} is unknown")));
            }
            _ => return Ok(escaped.into()),
        };
        let mut value = 0;
        for _ in 0..digits {
            let Some(digit) = self.rest.peek().and_then(|character| character.to_digit(16)) else {
                return Err(self.wrong(&format!("\\{escaped} needs {digits} hexadecimal digits")));
            };
            value = (value << 4) | digit;
            self.next();
        }
        match char::from_u32(value) {
            Some(character) => Ok(character.into()),
            None => Err(self.wrong(&format!("\\{escaped} names no character"))),
        }
    }
}

/// The ranges sorted and apart, without surrogates.
fn normalized(ranges: &[(u32, u32)]) -> Vec<(u32, u32)> {
    inverted(&inverted(ranges))
}

/// All other characters.
fn inverted(ranges: &[(u32, u32)]) -> Vec<(u32, u32)> {
    let mut sorted = ranges.to_vec();
    sorted.push((0xD800, 0xDFFF));
    sorted.sort_unstable();
    let mut others = Vec::new();
    let mut next = 0;
    for (first, last) in sorted {
        if first > next {
            others.push((next, first - 1));
        }
        next = next.max(last + 1);
    }
    if next <= LAST_CHAR {
        others.push((next, LAST_CHAR));
    }
    others
}

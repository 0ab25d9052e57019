package script

// Variant returns the same verb with another text.
func (s *Script) Variant(source string) *Script { return newScript(source, s.short) }

// With returns the same call of a variant of its script.
func (c Command) With(variant *Script) Command {
	args := append([]any(nil), c.args...)
	args[1] = variant.digest
	return Command{variant, args}
}

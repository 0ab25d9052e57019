-- fast/back.lua: who waits last, and where. A writer that tries does not need to know.

-- include lib/held.lua
local back = (held == 'set' or held == 'string' and HOW == 'join:0')
	and call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')

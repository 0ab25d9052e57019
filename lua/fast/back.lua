-- fast/back.lua: the last waiter, and its score. A writer that tries does not need it.

-- include lib/held.lua
local back = (KIND == 'r' and held == 'set' or HOW == 'join:0' and (held == 'set' or held == 'string'))
	and call('ZRANGE', INTENTS, '-1', '-1', 'WITHSCORES')

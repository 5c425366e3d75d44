-- issued -> filtered(reason). ARGV: id, reason, facts about the group (JSON, see store.py), patience: how many times
-- this may happen to the group before it counts. Returns 'filtered', 'again' (patience is left), 'duplicate', 'void' or
-- 'finished'.
local id, reason, facts = ARGV[1], ARGV[2], cjson.decode(ARGV[3])
if state_of(id) ~= 'issued' then return too_late(id) end
if redis.call('HINCRBY', key('about:' .. id), 'failures', 1) <= tonumber(ARGV[4]) then return 'again' end
land(id)
drop(id, 'filtered', reason)
account(facts)
return 'filtered'

-- issued -> filtered(reason). ARGV: id, reason, facts about the group (JSON, see store.py), patience: how many times
-- this may happen to the group before it counts. Returns 'filtered', 'again' (patience is left), 'duplicate' or 'void'.
local id, reason, facts = ARGV[1], ARGV[2], cjson.decode(ARGV[3])
if state_of(id) ~= 'issued' then return too_late(id) end
if redis.call('HINCRBY', key('about:' .. id), 'failures', 1) <= tonumber(ARGV[4]) then return 'again' end
land(id)
drop(id, 'filtered', reason)
count('tokens', facts.tokens)
add_lengths('delivered', facts.delivered, 1)
for why, lengths in pairs(facts.dropped) do drop_answers(why, lengths) end
if facts.outcome then redis.call('HSET', key('outcomes'), facts.task, facts.outcome) end
return 'filtered'

-- trained -> durable: a checkpoint on disk contains these groups' steps. args: steps (done, so those below). Returns how many.
local found = redis.call('ZRANGEBYSCORE', key('trained'), '-inf', '(' .. args.steps, 'WITHSCORES')
local groups = {}
for i = 1, #found, 2 do
  groups[#groups + 1] = {
    id = found[i], before = 'trained', score = found[i + 1], detail = 'in the checkpoint of ' .. args.steps .. ' steps',
    facts = {'durable_at', stamp()},
  }
end
enter_all('durable', groups)
count('durable', #groups)
return #groups
